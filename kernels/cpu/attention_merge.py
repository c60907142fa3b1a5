"""The merge of attention over disjoint sets of keys."""

from __future__ import annotations

import torch

from kernels.attention_state import AttentionState


def merge_attention_states(first: AttentionState, second: AttentionState) -> AttentionState:
    """See `Operations.merge_attention_states`. Where neither saw a key: output 0, log-sum-exp -inf."""
    lse = torch.logaddexp(first.lse, second.lse)
    share = torch.sigmoid(first.lse - second.lse)  # exp(a) / (exp(a) + exp(b)); of -inf and -inf NaN
    output = torch.lerp(second.output.float(), first.output.float(), share[..., None])
    output.masked_fill_((lse == -torch.inf)[..., None], 0.0)
    return AttentionState(output.to(first.output.dtype), lse)
