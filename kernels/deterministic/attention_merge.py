"""The merge of attention over disjoint sets of keys."""

from __future__ import annotations

import torch

from kernels.attention_state import AttentionState


def merge_attention_states(first: AttentionState, second: AttentionState) -> AttentionState:
    """See `Operations.merge_attention_states`. Where neither saw a key: output 0, log-sum-exp -inf.

    Not by `torch.logaddexp`, whose bits depend on where in its tensor a number lies (vector or remainder).
    """
    largest = torch.maximum(first.lse, second.lse)
    is_empty = largest == -torch.inf
    reference = largest.masked_fill(is_empty, 0.0)  # -inf - -inf would be NaN
    first_share, second_share = (first.lse - reference).exp_(), (second.lse - reference).exp_()
    mass = (first_share + second_share).masked_fill_(is_empty, 1.0)
    output = first.output.float() * first_share[..., None]
    output += second.output.float() * second_share[..., None]
    output /= mass[..., None]
    return AttentionState(output.to(first.output.dtype), largest + mass.log_())
