"""Query and key norm, rotary embedding and the write into the paged cache, in one pass over the projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.quantised import LARGEST_FLOAT8
from kernels.triton.launch import TileLaunch
from kernels.triton.partial_attention import check_scales
from kernels.triton.round_activations import round_to_float8

# 8 elements a thread, 16 bytes of bfloat16, for the two warps of a program.
TILE_ELEMENTS = 512
_LARGEST_FLOAT8 = tl.constexpr(LARGEST_FLOAT8)


@triton.jit
def _norm_and_rotate(
    first,  # [BLOCK_HEADS, BLOCK_WIDTH], model dtype: elements 0 .. D/2 - 1 of each head
    second,  # [BLOCK_HEADS, BLOCK_WIDTH], model dtype: elements D/2 .. D - 1
    weight_ptr,  # [HEAD_DIM], model dtype; not touched unless HAS_NORM
    rotation_ptr,  # [HEAD_DIM], float32: a token's cosines, then its sines
    eps,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Both halves of some heads of one token, rotated: float32 inside, rounded where the reference rounds."""
    dtype = first.dtype
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    in_half = columns < HEAD_DIM // 2
    first, second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        inverse_rms = tl.rsqrt(squares / HEAD_DIM + eps)
        first_weight = tl.load(weight_ptr + columns, mask=in_half, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HEAD_DIM // 2 + columns, mask=in_half, other=0.0).to(tl.float32)
        first = ((first * inverse_rms).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * inverse_rms).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    cos = tl.load(rotation_ptr + columns, mask=in_half, other=0.0)
    sin = tl.load(rotation_ptr + HEAD_DIM // 2 + columns, mask=in_half, other=0.0)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _as_float8(x, scales):
    """x / scales in e4m3, as bytes: half to even, at most 448 in magnitude, NaN where x is not finite."""
    x = x.to(tl.float32)
    is_finite = tl.abs(x) < float("inf")  # not where NaN
    steps = tl.div_rn(x, scales + tl.zeros_like(x))  # `/` is not correctly rounded
    steps = tl.where(is_finite, tl.minimum(tl.maximum(steps, -_LARGEST_FLOAT8), _LARGEST_FLOAT8), 0.0)
    stored = round_to_float8(steps).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(is_finite, stored, 0x7F).to(tl.uint8)


@triton.jit
def qk_norm_rope_store_kv_kernel(
    qkv_ptr,  # [T, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM], model dtype
    query_weight_ptr,  # [HEAD_DIM], model dtype; this and the next not touched unless HAS_NORM
    key_weight_ptr,  # [HEAD_DIM], model dtype
    cos_sin_ptr,  # [max_positions, HEAD_DIM], float32
    positions_ptr,  # [T], int64
    slot_mapping_ptr,  # [T], int64
    queries_ptr,  # [T, NUM_HEADS, HEAD_DIM], model dtype, contiguous, written
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM], model dtype or bytes of e4m3, written
    v_cache_ptr,  # the same
    kv_scales_ptr,  # [2, NUM_KV_HEADS], float32; None: not e4m3
    stride_qkv_token,
    stride_cos_sin_position,
    stride_k_block,
    stride_k_offset,
    stride_k_head,
    stride_v_block,
    stride_v_offset,
    stride_v_head,
    eps,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Some query, key or value heads of one token a program; their halves are loaded apart, so that none is shuffled.

    Grid: (T * (cdiv(NUM_HEADS, BLOCK_HEADS) + 2 * cdiv(NUM_KV_HEADS, BLOCK_HEADS)),), a token's groups side by side
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    QUERY_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    group = tl.program_id(0) % (QUERY_GROUPS + 2 * KV_GROUPS)
    token = (tl.program_id(0) // (QUERY_GROUPS + 2 * KV_GROUPS)).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    in_half = columns < HALF
    rotation_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * stride_cos_sin_position
    token_ptr = qkv_ptr + token * stride_qkv_token
    if group < QUERY_GROUPS:
        heads += group * BLOCK_HEADS
        mask = (heads < NUM_HEADS) & in_half
        source = token_ptr + heads * HEAD_DIM + columns
        first, second = tl.load(source, mask=mask, other=0.0), tl.load(source + HALF, mask=mask, other=0.0)
        first, second = _norm_and_rotate(
            first, second, query_weight_ptr, rotation_ptr, eps, HAS_NORM, HEAD_DIM, BLOCK_WIDTH
        )
        target = queries_ptr + token * (NUM_HEADS * HEAD_DIM) + heads * HEAD_DIM + columns
        tl.store(target, first, mask=mask)
        tl.store(target + HALF, second, mask=mask)
    else:
        slot = tl.load(slot_mapping_ptr + token)  # int64, so that a block's offset may pass 2^31 elements
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        heads += (group - QUERY_GROUPS) % KV_GROUPS * BLOCK_HEADS
        mask = (heads < NUM_KV_HEADS) & in_half & (slot >= 0)
        if group < QUERY_GROUPS + KV_GROUPS:
            source = token_ptr + (NUM_HEADS + heads) * HEAD_DIM + columns
            first, second = tl.load(source, mask=mask, other=0.0), tl.load(source + HALF, mask=mask, other=0.0)
            first, second = _norm_and_rotate(
                first, second, key_weight_ptr, rotation_ptr, eps, HAS_NORM, HEAD_DIM, BLOCK_WIDTH
            )
            places = k_cache_ptr + block * stride_k_block + offset * stride_k_offset + heads * stride_k_head + columns
            scale_head = heads
        else:
            source = token_ptr + (NUM_HEADS + NUM_KV_HEADS + heads) * HEAD_DIM + columns
            first, second = tl.load(source, mask=mask, other=0.0), tl.load(source + HALF, mask=mask, other=0.0)
            places = v_cache_ptr + block * stride_v_block + offset * stride_v_offset + heads * stride_v_head + columns
            scale_head = heads + NUM_KV_HEADS
        if kv_scales_ptr is not None:
            scales = tl.load(kv_scales_ptr + scale_head, mask=heads < NUM_KV_HEADS, other=1.0)
            tl.store(places, _as_float8(first, scales), mask=mask)
            tl.store(places + HALF, _as_float8(second, scales), mask=mask)
        else:
            tl.store(places, first, mask=mask)
            tl.store(places + HALF, second, mask=mask)


def qk_norm_rope_store_kv(
    qkv: torch.Tensor,
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Operations.qk_norm_rope_store_kv`.

    Raises ValueError where the elements of a head do not lie side by side, or scales and dtype do not go together.
    """
    check_layout(qkv=qkv, cos_sin=cos_sin, k_cache=k_cache, v_cache=v_cache)
    check_scales(k_cache, v_cache, kv_scales)
    if kv_scales is not None:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    queries = torch.empty((qkv.shape[0], num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if queries.shape[0] == 0:
        return queries
    *norm_weights, eps = (qkv, qkv, 0.0) if qk_norm is None else qk_norm
    strides = (qkv.stride(0), cos_sin.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3])
    launch = rope_launch(num_heads, head_dim)
    num_groups = triton.cdiv(num_heads, launch.rows) + 2 * triton.cdiv(num_kv_heads, launch.rows)
    qk_norm_rope_store_kv_kernel[(queries.shape[0] * num_groups,)](
        qkv,
        *norm_weights,
        cos_sin,
        positions,
        slot_mapping,
        queries,
        k_cache,
        v_cache,
        kv_scales,
        *strides,
        eps,
        HAS_NORM=qk_norm is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_HEADS=launch.rows,
        BLOCK_WIDTH=launch.columns,
        num_warps=launch.num_warps,
    )
    return queries


def check_layout(**tensors: torch.Tensor) -> None:
    """Raise ValueError where the elements of a head, or of a position's angles, do not lie side by side."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; accepted: 1 in the last dimension")


def rope_launch(num_heads: int, head_dim: int) -> TileLaunch:
    """A tile is one half of some heads of one token; the other half is a second tile.

    The heads share the token's cosines and sines, in float32 as large as two bfloat16 heads.
    """
    width = triton.next_power_of_2(head_dim // 2)
    heads = min(max(TILE_ELEMENTS // width, 1), triton.next_power_of_2(num_heads))
    return TileLaunch(heads, width, 1 if heads * width <= TILE_ELEMENTS // 2 else 2)
