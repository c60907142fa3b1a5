"""Penalties on tokens that have occurred."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.vocab_launch import penalties_launch


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """See `Operations.apply_penalties`. Touches nothing but the tokens that occurred.

    Raises nothing: a row or token outside of `logits` is undefined, as in every kernel.
    """
    num_pairs = rows.shape[0]
    if num_pairs == 0:
        return
    launch = penalties_launch()
    _apply_penalties_kernel[(triton.cdiv(num_pairs, launch.block),)](
        logits,
        rows.contiguous(),
        token_ids.contiguous(),
        output_counts.contiguous(),
        repetition.contiguous(),
        presence.contiguous(),
        frequency.contiguous(),
        num_pairs,
        logits.stride(0),
        logits.stride(1),
        BLOCK=launch.block,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,  # the reference rounds each product
    )


@triton.jit(do_not_specialize=["num_pairs"])  # it changes with every step
def _apply_penalties_kernel(
    logits_ptr,  # [N, V], float32, in place
    rows_ptr,  # [M], int64
    tokens_ptr,  # [M], int64
    counts_ptr,  # [M], int32
    repetition_ptr,  # [N], float32
    presence_ptr,  # [N], float32
    frequency_ptr,  # [N], float32
    num_pairs,
    stride_logits_row,
    stride_logits_token,
    BLOCK: tl.constexpr,
):
    """Grid: (blocks of pairs,)."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = pairs < num_pairs
    rows = tl.load(rows_ptr + pairs, mask=present, other=0)
    tokens = tl.load(tokens_ptr + pairs, mask=present, other=0)
    counts = tl.load(counts_ptr + pairs, mask=present, other=0)
    repetition = tl.load(repetition_ptr + rows, mask=present, other=1.0)
    presence = tl.load(presence_ptr + rows, mask=present, other=0.0)
    frequency = tl.load(frequency_ptr + rows, mask=present, other=0.0)
    value_ptrs = logits_ptr + rows * stride_logits_row + tokens * stride_logits_token
    values = tl.load(value_ptrs, mask=present, other=0.0)
    # div_rn: what `/` compiles to is not correctly rounded.
    values = tl.where(values < 0.0, values * repetition, tl.div_rn(values, repetition))
    values = values - frequency * counts.to(tl.float32)
    values = tl.where(counts > 0, values - presence, values)
    tl.store(value_ptrs, values, mask=present)
