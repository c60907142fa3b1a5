"""The merge of attention over disjoint sets of keys."""

from __future__ import annotations

import torch

from kernels.attention_state import AttentionState


def merge_attention_states(first: AttentionState, second: AttentionState) -> AttentionState:
    """See `Operations.merge_attention_states`. Where neither saw a key: output 0, log-sum-exp -inf."""
    lse = torch.logaddexp(first.lse, second.lse)
    reference = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - -inf would be NaN
    output = first.output.float() * (first.lse - reference).exp_()[..., None]
    output.add_(second.output.float() * (second.lse - reference).exp_()[..., None])
    return AttentionState(output.to(first.output.dtype), lse)
