"""Attention summed up over one set of keys after another."""

from __future__ import annotations

import torch

from kernels.attention_state import AttentionState


class RunningAttention:
    """Accumulates partial attention in float32, so that many parts cost one rounding."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        """shape: (num_queries, Hq, D)."""
        self._output = torch.zeros(shape, device=device)
        self._lse = torch.full(shape[:2], -torch.inf, device=device)

    def add(self, query_ids: torch.Tensor | slice, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Attention of some queries over keys not seen by them before.

        query_ids [n] int64 without repetition, or a slice; output [n, Hq, D], lse [n, Hq] float32, finite or NaN.
        """
        before = self._lse[query_ids]
        after = torch.logaddexp(before, lse)
        old_share = (before - after).exp_()[..., None]
        new_share = (lse - after).exp_()[..., None]
        self._output[query_ids] = (self._output[query_ids] * old_share).add_(output.float().mul_(new_share))
        self._lse[query_ids] = after

    def state(self, dtype: torch.dtype) -> AttentionState:
        """The sum so far; output 0 and log-sum-exp -inf for queries without keys."""
        return AttentionState(self._output.to(dtype), self._lse)
