"""One tile of keys and values: how every attention kernel reads it and adds it to its running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

# A running maximum starts here and not at -inf: -inf - -inf would be NaN where no key was seen yet. Below every score.
LOWEST_SCORE = tl.constexpr(-3.38e38)


@triton.jit
def load_tile(
    k_head_ptr,  # k_cache of one head
    v_head_ptr,
    block_table_ptr,  # of one row, int32
    positions,  # [TILE], int32, of the keys in the row
    end,  # positions from here on are no keys; without meaning where IS_FULL
    stride_cache_block,
    stride_cache_slot,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Keys [BLOCK_D, TILE] and values [TILE, BLOCK_D] at the positions; 0 from `end` and from HEAD_DIM on.

    Where nothing is left out nothing is masked, so that copies of 16 bytes need no predicate.
    """
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    is_key = positions < end
    if IS_FULL:
        blocks = tl.load(block_table_ptr + positions // BLOCK_SIZE).to(tl.int64)
    else:
        blocks = tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    offsets = blocks * stride_cache_block + positions % BLOCK_SIZE * stride_cache_slot
    k_ptrs, v_ptrs = k_head_ptr + offsets[None, :] + dims[:, None], v_head_ptr + offsets[:, None] + dims[None, :]
    if not IS_FULL:
        k = tl.load(k_ptrs, mask=is_key[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0.0)
    elif BLOCK_D == HEAD_DIM:
        k, v = tl.load(k_ptrs), tl.load(v_ptrs)
    else:
        k = tl.load(k_ptrs, mask=is_dim[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=is_dim[None, :], other=0.0)
    return k, v


@triton.jit
def add_tile(scores, v, top, mass, acc, scale_log2e):
    """The running maximum (base 2), sum of exponentials and weighted values after one more tile.

    scores [BLOCK_M, TILE] float32, not scaled, -inf where a query does not see a key; scale_log2e is above 0.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2e)
    p = tl.exp2(scores * scale_log2e - new_top[:, None])
    decay = tl.exp2(top - new_top)
    mass = mass * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_top, mass, acc
