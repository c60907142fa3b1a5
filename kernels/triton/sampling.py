"""Finds the most likely token and applies penalties; floats as sortable integers for every kernel over logits [N, V].

The integers settle NaN and ties in one place. Launch parameters are the same on every architecture and follow from the
bytes in flight and the registers of the compiled kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from kernels.triton.launch import DEFAULT_MULTIPROCESSORS, TileLaunch

NAN_KEY = tl.constexpr(0x7FFFFFFF)
INFINITY_KEY = tl.constexpr(0x7F800000)
MINUS_ZERO_KEY = tl.constexpr(-1)
MINUS_INFINITY_KEY = tl.constexpr(-0x7F800001)
LOWEST_KEY = tl.constexpr(-0x80000000)  # below the key of every float
LOWEST_RANK = tl.constexpr(-(2**63))  # below what `ranked` makes of any token

WIDE_BLOCK = 8192  # tokens; vLLM's block of Gumbel-max, see argmax_launch
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
def is_finite(values):
    """Neither NaN nor infinite."""
    return (values > -float("inf")) & (values < float("inf"))


@triton.jit
def ranked(values, tokens):
    """float32 and token ids -> int64 whose maximum is the largest value, of equals the one with the lowest id."""
    return (ordered(values).to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def token_of_rank(rank):
    """The token id that `ranked` put into an int64."""
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `Operations.argmax`. A NaN counts as the largest value, as in PyTorch."""
    return best_tokens(_argmax_kernel, argmax_launch(*logits.shape), logits)


def best_tokens(
    kernel: JITFunction, launch: TileLaunch, logits: torch.Tensor, *others: torch.Tensor, **options: bool
) -> torch.Tensor:
    """The token that ranks highest in each row of logits [N, V] -> [N] int64.

    kernel: takes logits and others, and writes the best of each block of tokens by `ranked`.
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_blocks = triton.cdiv(vocab_size, launch.columns)
    ranks = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    kernel[(num_rows, num_blocks)](
        *(logits, *others, ranks, vocab_size, logits.stride(0)),
        BLOCK=launch.columns,
        num_warps=launch.num_warps,
        **options,
    )
    launch = best_of_blocks_launch(num_blocks)
    _best_of_blocks_kernel[(num_rows,)](ranks, tokens, num_blocks, BLOCK=launch.columns, num_warps=launch.num_warps)
    return tokens


@triton.jit
def _argmax_kernel(
    logits_ptr,  # [N, V], float32
    ranks_ptr,  # [N, number of blocks], int64, output
    vocab_size,
    stride_logits_row,
    BLOCK: tl.constexpr,
):
    """Grid: (rows, blocks of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    # What lies past the vocabulary ranks below every token: -inf, and ids above all of theirs.
    values = tl.load(logits_ptr + row * stride_logits_row + tokens, mask=tokens < vocab_size, other=-float("inf"))
    tl.store(ranks_ptr + row * tl.num_programs(1) + block, tl.max(ranked(values, tokens)))


@triton.jit
def _best_of_blocks_kernel(
    ranks_ptr,  # [N, num_blocks], int64
    tokens_ptr,  # [N], int64, output
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK)
    ranks = tl.load(ranks_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=LOWEST_RANK)
    tl.store(tokens_ptr + row, token_of_rank(tl.max(ranks)))


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


def argmax_launch(num_rows: int, vocab_size: int) -> TileLaunch:
    """Wide blocks, 32 tokens (8 loads of 16 bytes) a thread, unless that gives some multiprocessors none."""
    if num_rows * triton.cdiv(vocab_size, WIDE_BLOCK) >= DEFAULT_MULTIPROCESSORS:
        return TileLaunch(1, WIDE_BLOCK, num_warps=8)
    return TileLaunch(1, NARROW_BLOCK, num_warps=4)


def best_of_blocks_launch(num_blocks: int) -> TileLaunch:
    """The second stage: one load for the 19 to 75 blocks of a row."""
    return TileLaunch(1, triton.next_power_of_2(num_blocks), num_warps=1)


def penalties_launch() -> TileLaunch:
    """Two pairs a thread, whose 4 bytes of logits lie anywhere."""
    return TileLaunch(1, 256, num_warps=4)
