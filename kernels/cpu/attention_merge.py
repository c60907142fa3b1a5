"""The merge of attention over disjoint sets of keys."""

from __future__ import annotations

import torch

from kernels.attention_state import AttentionState


def merge_attention_states(first: AttentionState, second: AttentionState) -> AttentionState:
    """See `Operations.merge_attention_states`. Where neither saw a key: output 0, log-sum-exp -inf."""
    lse = torch.logaddexp(first.lse, second.lse)
    # exp(a) / (exp(a) + exp(b)) = sigmoid(a - b); where neither saw a key, -inf - -inf is NaN.
    share = torch.sigmoid(first.lse - second.lse).masked_fill_(lse == -torch.inf, 0.0)
    output = torch.lerp(second.output.float(), first.output.float(), share[..., None])
    return AttentionState(output.to(first.output.dtype), lse)
