"""The merge of attention over disjoint sets of keys."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.attention_state import AttentionState
from kernels.triton.attention_launch import MERGE_NUM_WARPS, merge_block_rows, padded_head_dim

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))


def merge_attention_states(first: AttentionState, second: AttentionState) -> AttentionState:
    """See `Operations.merge_attention_states`. Where neither saw a key: output 0, log-sum-exp -inf."""
    output = torch.empty(first.output.shape, dtype=first.output.dtype, device=first.output.device)
    lse = torch.empty(first.lse.shape, dtype=torch.float32, device=first.lse.device)
    num_rows, head_dim = lse.numel(), output.shape[-1]
    if num_rows == 0:
        return AttentionState(output, lse)
    inputs = (first.output, first.lse, second.output, second.lse)
    block_rows = merge_block_rows(head_dim)
    _merge_kernel[(triton.cdiv(num_rows, block_rows),)](
        output,
        lse,
        *(tensor.contiguous() for tensor in inputs),
        num_rows,
        HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        BLOCK_ROWS=block_rows,
        num_warps=MERGE_NUM_WARPS,
    )
    return AttentionState(output, lse)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    output_ptr,  # [num_rows, HEAD_DIM], model dtype
    lse_ptr,  # [num_rows], float32, natural
    first_output_ptr,  # [num_rows, HEAD_DIM], model dtype
    first_lse_ptr,  # [num_rows], float32, natural
    second_output_ptr,  # as first_output
    second_lse_ptr,  # as first_lse
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """BLOCK_ROWS (query, head) pairs: each output weighted with its share of the sum of exponentials.

    Grid: (cdiv(num_rows, BLOCK_ROWS),).
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    first_lse = tl.load(first_lse_ptr + rows, mask=is_row, other=0.0)
    second_lse = tl.load(second_lse_ptr + rows, mask=is_row, other=0.0)
    # What saw no key is not read: it may be anything, and its share of 0 would make NaN of a NaN.
    is_first = is_element & (first_lse != -float("inf"))[:, None]
    is_second = is_element & (second_lse != -float("inf"))[:, None]
    first_output = tl.load(first_output_ptr + offsets, mask=is_first, other=0.0).to(tl.float32)
    second_output = tl.load(second_output_ptr + offsets, mask=is_second, other=0.0).to(tl.float32)

    top = tl.maximum(first_lse, second_lse)
    # No key on either side; -inf - -inf would be NaN. Not asked of `top`: a GPU's maximum passes over a NaN.
    is_empty = (first_lse == -float("inf")) & (second_lse == -float("inf"))
    top = tl.where(is_empty, 0.0, top)
    first_mass = tl.exp2((first_lse - top) * LOG2E)
    second_mass = tl.exp2((second_lse - top) * LOG2E)
    mass = tl.where(is_empty, 1.0, first_mass + second_mass)
    output = (first_output * first_mass[:, None] + second_output * second_mass[:, None]) / mass[:, None]
    output = tl.where(is_empty[:, None], 0.0, output)
    lse = tl.where(is_empty, -float("inf"), top + tl.log2(mass) * LN2)
    tl.store(lse_ptr + rows, lse, mask=is_row)
    tl.store(output_ptr + offsets, output.to(output_ptr.dtype.element_ty), mask=is_element)
