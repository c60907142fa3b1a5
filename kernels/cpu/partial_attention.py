"""Attention over a part of the keys, with its log-sum-exp, and the merge of such parts.

Two ways to compute a part: PyTorch's flash attention, which unlike `scaled_dot_product_attention` also returns the
log-sum-exp, and two batched matrix products, faster for a few queries over many keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from kernels.operands import ScoreRule

# Numbers of queries of a KV head for which `matmul_attention` is faster in float32. Over 384 keys of 8 heads of 128,
# 8, 32, 128, 256 and 512 queries take it 0.30, 0.53, 1.50, 2.85 and 5.7 ms, flash attention 0.25, 0.73, 2.68, 2.70 and
# 5.3 (two threads, Xeon 2.5 GHz with AVX-512). From 192 on flash attention takes larger tiles.
MIN_QUERIES = 16
MAX_QUERIES = 191
# Scores that are kept at a time where they are capped, which no operator does: 4 MiB in float32.
MAX_CAPPED_SCORES = 1 << 20


class AttentionState(NamedTuple):
    """Output and log-sum-exp of attention over some set of keys (FlashInfer's "attention state", arXiv 2501.01005)."""

    output: torch.Tensor  # [num_queries, num_heads, head_dim], dtype of the query
    lse: torch.Tensor  # [num_queries, num_heads], float32, natural logarithm; -inf where no key was seen

    @classmethod
    def without_keys(cls, shape: Sequence[int], dtype: torch.dtype) -> Self:
        """The state before any key was seen: output 0. shape and dtype of the output."""
        return cls(torch.zeros(shape, dtype=dtype), torch.full(shape[:2], -torch.inf))


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense, equally long sequences.

    q [B, Hq, Q, D], k and v [B, Hkv, S, D] with Hq a multiple of Hkv, any strides but that of D;
    causal: query j sees keys 0 .. j (so Q == S is meant); mask: added to the scores, [B, 1, 1 or Q, S] float32.
    -> output [B, Hq, Q, D] (dtype of q; float32 for float16 and with a soft cap), log-sum-exp [B, Hq, Q] float32.
    """
    if rule.soft_cap is not None:
        if causal:
            mask = torch.full((1, 1, q.shape[2], k.shape[2]), -torch.inf).triu_(1)
        return _capped_attention(q.float(), k.float(), v.float(), rule, mask)
    if q.dtype is torch.float16:
        q, k, v = q.float(), k.float(), v.float()
    if mask is not None:
        mask = mask.to(q.dtype)  # the operator insists on the query's dtype; 0 and -inf are exact in all
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=rule.scale
    )
    return result


def _capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attention` in float32 whose scores are capped, for as many queries at a time as have few enough scores."""
    batch, num_heads, num_queries, head_dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    output, lse = torch.empty(q.shape), torch.empty(q.shape[:3])
    step = max(MAX_CAPPED_SCORES // (batch * num_heads * num_keys), 1)
    for first in range(0, num_queries, step):
        some = slice(first, first + step)
        queries = q[:, :, some].reshape(batch, num_kv_heads, -1, head_dim)
        scores = cap(torch.matmul(queries, k.transpose(2, 3)).mul_(rule.scale), rule.soft_cap)
        if mask is not None:
            by_head = scores.view(batch, num_heads, -1, num_keys)
            by_head += mask if mask.shape[2] == 1 else mask[:, :, some]
        largest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(largest).exp_()
        sums = weights.sum(-1, keepdim=True)
        output[:, :, some] = torch.matmul(weights, v).div_(sums).view(batch, num_heads, -1, head_dim)
        lse[:, :, some] = largest.add_(sums.log_()).view(batch, num_heads, -1)
    return output, lse


def cap(scores: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """The scores, of any shape in float32, capped in place where there is a cap: c * tanh(s / c)."""
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)


def matmul_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attention` of one sequence without a mask: q [1, H, Q, D], k and v [1, H, S, D], all float32.

    The scores [H, Q, S] are kept whole: 3 MB for the most queries of 8 heads over the 512 keys of a piece.
    """
    scores = torch.baddbmm(q.new_empty(()), q[0], k[0].transpose(1, 2), beta=0, alpha=rule.scale)
    scores = cap(scores, rule.soft_cap)
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    sums = weights.sum(-1, keepdim=True)
    output = torch.bmm(weights, v[0]).div_(sums)
    return output[None], largest.add_(sums.log_()).squeeze(-1)[None]


class RunningAttention:
    """Adds up attention over parts of the keys in float32, so that many parts cost one rounding."""

    def __init__(self, shape: Sequence[int]) -> None:
        """shape: (num_queries, Hq, D)."""
        self._output, self._lse = AttentionState.without_keys(shape, torch.float32)

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


def with_sinks(state: AttentionState, sinks: torch.Tensor | None) -> AttentionState:
    """The state as if one more key with a score of sinks [Hq] and a value of 0 had been seen; as it is without sinks.

    Once for each query: what other parts are merged with it later has none.
    """
    if sinks is None:
        return state
    share = torch.sigmoid(state.lse - sinks)  # exp(lse) / (exp(lse) + exp(sink)); 0 where no key was seen
    output = (state.output.float() * share[..., None]).to(state.output.dtype)
    return AttentionState(output, torch.logaddexp(state.lse, sinks.expand_as(state.lse)))


def merge_attention_states(first: AttentionState, second: AttentionState) -> torch.Tensor:
    """Output [num_queries, num_heads, head_dim] of attention over two disjoint sets of keys, in the first one's dtype,
    from the attention over each; 0 where neither holds a key.
    """
    share = torch.sigmoid(first.lse - second.lse)  # exp(a) / (exp(a) + exp(b)); of -inf and -inf NaN
    output = torch.lerp(second.output.float(), first.output.float(), share[..., None])
    has_no_key = torch.maximum(first.lse, second.lse) == -torch.inf
    output.masked_fill_(has_no_key[..., None], 0.0)
    return output.to(first.output.dtype)
