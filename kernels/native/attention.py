"""Calls native attention: decode, chunks of prompts and shared prefixes over the paged cache, in one call."""

from __future__ import annotations

from ctypes import byref

import torch

from kernels.native.library import AttentionArgs, Kernels, pointer
from kernels.operands import AttentionRows, refuse_float8

Tensor = torch.Tensor

# Heads are read by vectors of 64 bytes and a rest in words of 4. Other sizes exist in no family that the engine loads.
HEAD_DIM_STEP = 8
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16)


def is_attended(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether `paged_attention` takes these tensors; where it does not, `kernels.cpu` does.

    It takes float32 and bfloat16, a head_dim of 8 to 256 in steps of 8, and caches whose dimensions lie side by side
    and whose strides are the same.
    """
    head_dim = q.shape[2]
    return (
        q.dtype in DTYPES
        and head_dim % HEAD_DIM_STEP == 0
        and 0 < head_dim <= MAX_HEAD_DIM
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride(3) == 1
    )


def paged_attention(
    kernels: Kernels, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float
) -> Tensor:
    """Causal attention of ragged chunks, a decode row being a chunk of one query. See `Operations`.

    Rows with one query and up to sixteen query heads a KV head (AMX: eight) read keys as vectors, others in tiles;
    prefixes of `rows.prefix_groups` are attended once a group. Long rows are cut for the threads and merged. Raises
    ValueError for float8.
    """
    refuse_float8(k_cache, v_cache, rows.kv_scales)
    if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        q = q.contiguous()
    groups = rows.once(("native_groups",), lambda: torch.tensor(rows.prefix_groups, dtype=torch.int64))
    out = q.new_empty(q.shape)
    args = AttentionArgs(
        q=q.data_ptr(),
        k=k_cache.data_ptr(),
        v=v_cache.data_ptr(),
        is_float=q.dtype is torch.float32,
        heads=q.shape[1],
        kv_heads=k_cache.shape[2],
        dim=q.shape[2],
        block_size=k_cache.shape[1],
        q_stride=q.stride(0),
        block_stride=k_cache.stride(0),
        token_stride=k_cache.stride(1),
        head_stride=k_cache.stride(2),
        tables=rows.block_tables.data_ptr(),
        table_width=rows.block_tables.stride(0),
        starts=rows.cu_seqlens_q.data_ptr(),
        lens=rows.seq_lens.data_ptr(),
        rows=rows.num_rows,
        groups=pointer(groups),
        num_groups=len(rows.prefix_groups),
        window=rows.window or 0,
        scale=scale,
        soft_cap=rows.soft_cap or 0.0,
        sinks=None if rows.sinks is None else rows.sinks.data_ptr(),
        out=out.data_ptr(),
    )
    kernels.attention(byref(args))
    return out
