"""Query and key norm, rotary embedding and the write into the paged cache."""

from __future__ import annotations

import torch

from kernels.cpu.dense import rms_norm


def qk_norm_rope_store_kv(
    qkv: torch.Tensor,
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See `Operations.qk_norm_rope_store_kv`.

    In float32 the result is transformers' bit for bit. In bfloat16 and float16 the rotation is computed in float32 and
    rounded once, where transformers rounds the cosine, the sine and both products.
    """
    num_kv_heads, head_dim = k_cache.shape[-2:]
    num_tokens = qkv.shape[0]
    heads = qkv.view(num_tokens, -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    queries, keys, values = torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), dim=1)
    if qk_norm is not None:
        query_weight, key_weight, eps = qk_norm
        queries = rms_norm(queries, query_weight, eps)
        keys = rms_norm(keys, key_weight, eps)
    cos, sin = cos_sin.index_select(0, positions)[:, None, :].chunk(2, dim=-1)
    _store(_rotate(keys, cos, sin), k_cache, slot_mapping)
    _store(values, v_cache, slot_mapping)
    return _rotate(queries, cos, sin)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.empty_like(heads, memory_format=torch.contiguous_format)
    half = first.shape[-1]
    rotated[..., :half] = (first * cos).sub_(second * sin)
    rotated[..., half:] = (second * cos).add_(first * sin)
    return rotated


def _store(heads: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    slots = cache.view(-1, *cache.shape[2:])
    written = slot_mapping >= 0
    if not written.all():
        kept = written.nonzero().flatten()
        heads, slot_mapping = heads.index_select(0, kept), slot_mapping.index_select(0, kept)
    slots.index_copy_(0, slot_mapping, heads)
