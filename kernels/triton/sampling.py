"""Applies penalties; floats as sortable integers for every kernel over logits [N, V].

The integers settle NaN and ties in one place. Launch parameters are the same on every architecture and follow from the
bytes in flight and the registers of the compiled kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launch import TileLaunch

NAN_KEY = tl.constexpr(0x7FFFFFFF)
INFINITY_KEY = tl.constexpr(0x7F800000)
MINUS_ZERO_KEY = tl.constexpr(-1)
MINUS_INFINITY_KEY = tl.constexpr(-0x7F800001)
LOWEST_KEY = tl.constexpr(-0x80000000)  # below the key of every float
LOWEST_RANK = tl.constexpr(-(2**63))  # below what `ranked` makes of any token

NARROW_BLOCK = 2048


@triton.jit
def ordered(values):
    """float32 -> int32 keys in the same order: -0 equals 0, and every NaN is one value above +inf."""
    bits = values.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(keys == MINUS_ZERO_KEY, 0, keys)
    return tl.where((bits & 0x7FFFFFFF) > INFINITY_KEY, NAN_KEY, keys)


@triton.jit
def value_of(keys):
    """The float32 of an int32 key."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def ranked(values, tokens):
    """float32 and token ids -> int64 whose maximum is the largest value, of equals the one with the lowest id."""
    return (ordered(values).to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def token_of_rank(rank):
    """The token id that `ranked` put into an int64."""
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF)


@triton.jit
def key_of_best(ranks_ptr, num_blocks, BLOCKS: tl.constexpr):
    """The key of the best of one row's ranks."""
    blocks = tl.arange(0, BLOCKS)
    ranks = tl.load(ranks_ptr + blocks, mask=blocks < num_blocks, other=LOWEST_RANK)
    return (tl.max(ranks) >> 32).to(tl.int32)


@triton.jit
def load_known(logits_ptr, is_known_ptr, tokens, vocab_size):
    """float32 logits of one row at these tokens, all of them and with -inf where a token is not known."""
    is_token = tokens < vocab_size
    values = tl.load(logits_ptr + tokens, mask=is_token, other=-float("inf")).to(tl.float32)
    is_known = tl.load(is_known_ptr + tokens, mask=is_token, other=0)
    return values, tl.where(is_known != 0, values, -float("inf"))


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

    A row or token outside of `logits` is undefined behaviour, as in every kernel.
    """
    num_pairs = rows.shape[0]
    if num_pairs == 0:
        return
    launch = penalties_launch()
    _apply_penalties_kernel[(triton.cdiv(num_pairs, launch.columns),)](
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
        BLOCK=launch.columns,
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


def best_of_blocks_launch(num_blocks: int) -> TileLaunch:
    """The second stage: one load for the 19 to 75 blocks of a row."""
    return TileLaunch(1, triton.next_power_of_2(num_blocks), num_warps=1)


def penalties_launch() -> TileLaunch:
    """Two pairs a thread, whose 4 bytes of logits lie anywhere."""
    return TileLaunch(1, 256, num_warps=4)
