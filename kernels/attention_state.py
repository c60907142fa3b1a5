"""Attention over a part of the keys, in a form that can be merged with another part."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch


class AttentionState(NamedTuple):
    """Output and log-sum-exp of attention over some set of keys (FlashInfer's "attention state", arXiv 2501.01005)."""

    output: torch.Tensor  # [num_queries, num_heads, head_dim], dtype of the query
    lse: torch.Tensor  # [num_queries, num_heads], float32, natural logarithm; -inf where no key was seen

    @classmethod
    def without_keys(cls, q: torch.Tensor, dtype: torch.dtype) -> Self:
        """Before any key was seen: output 0. q [num_queries, num_heads, head_dim]; dtype of the output."""
        output = torch.zeros(q.shape, dtype=dtype, device=q.device)
        return cls(output, torch.full(q.shape[:2], -torch.inf, device=q.device))
