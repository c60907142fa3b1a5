"""Attention summed up over one block of keys after another."""

from __future__ import annotations

import torch

from kernels.attention_state import AttentionState


class RunningAttention:
    """Accumulates attention over blocks of keys in float32, in the order in which they are added.

    Not by `torch.logaddexp`, whose bits depend on where in its tensor a number lies (vector or remainder).
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        """shape: (num_queries, Hq, D)."""
        self._output = torch.zeros(shape, device=device)
        self._mass = torch.zeros(shape[:2], device=device)
        self._largest = torch.full(shape[:2], -torch.inf, device=device)

    def add(self, queries: slice, output: torch.Tensor, lse: torch.Tensor) -> None:
        """output [n, Hq, D] and lse [n, Hq] of some queries over their next block, which holds a key for each."""
        before = self._largest[queries]
        after = torch.maximum(before, lse)
        old_share = (before - after).exp_()
        new_share = (lse - after).exp_()
        self._output[queries] *= old_share[..., None]
        self._output[queries] += output * new_share[..., None]
        self._mass[queries] *= old_share
        self._mass[queries] += new_share
        self._largest[queries] = after

    def state(self, dtype: torch.dtype) -> AttentionState:
        """The sum so far; output 0 and log-sum-exp -inf for queries without keys."""
        mass = self._mass.masked_fill(self._largest == -torch.inf, 1.0)
        return AttentionState((self._output / mass[..., None]).to(dtype), self._largest + mass.log_())
