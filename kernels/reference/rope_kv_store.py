"""Query and key norm, rotary embedding and the write into the paged cache."""

from __future__ import annotations

import torch

from kernels.reference.normalisation import rms_norm


def qk_norm_rope_store_kv(
    qkv: torch.Tensor,
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See `Operations.qk_norm_rope_store_kv`. One token, one head at a time."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    queries = qkv.new_empty(num_tokens, num_heads, head_dim)
    for token in range(num_tokens):
        heads = qkv[token].view(-1, head_dim)
        rotation = cos_sin[positions[token]]
        for head in range(num_heads):
            query = heads[head] if qk_norm is None else rms_norm(heads[head], qk_norm[0], qk_norm[2])
            queries[token, head] = _rotate(query, rotation)
        slot = int(slot_mapping[token])
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        for kv_head in range(num_kv_heads):
            key = heads[num_heads + kv_head]
            key = key if qk_norm is None else rms_norm(key, qk_norm[1], qk_norm[2])
            k_cache[block, offset, kv_head] = _rotate(key, rotation)
            v_cache[block, offset, kv_head] = heads[num_heads + num_kv_heads + kv_head]
    return queries


def _rotate(head: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + D/2) by its angle. head [D]; rotation [D] float32, cosines then sines."""
    first, second = head.float().chunk(2)
    cos, sin = rotation.chunk(2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin)).to(head.dtype)
