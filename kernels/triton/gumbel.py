"""Draws tokens by Gumbel-max with a seed: `kernels.gumbel_noise` to the bit, so launched without fused multiply-add."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import gumbel_noise as spec
from kernels.triton.launch import TileLaunch
from kernels.triton.sampling import (
    INFINITY_KEY,
    LOWEST_RANK,
    MINUS_INFINITY_KEY,
    NARROW_BLOCK,
    best_of_blocks_launch,
    best_tokens,
    ordered,
    ranked,
    token_of_rank,
    value_of,
)

KEY_START_FIRST = tl.constexpr(spec.KEY_START_FIRST)
KEY_START_SECOND = tl.constexpr(spec.KEY_START_SECOND)
MIX_FIRST = tl.constexpr(spec.MIX_FIRST)
MIX_SECOND = tl.constexpr(spec.MIX_SECOND)
TOKEN_STEP = tl.constexpr(spec.TOKEN_STEP)
SQRT2 = tl.constexpr(spec.SQRT2)
LN2_HIGH = tl.constexpr(spec.LN2_HIGH)
LN2_LOW = tl.constexpr(spec.LN2_LOW)
# From the last to the first, as Horner's scheme takes them.
COEFFICIENTS = tl.constexpr(tuple(reversed(spec.LOG1P_COEFFICIENTS)))
NUM_COEFFICIENTS = tl.constexpr(len(spec.LOG1P_COEFFICIENTS))


def gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See `Operations.gumbel_argmax` and `kernels.gumbel_noise`."""
    keys = (seeds.contiguous(), positions.contiguous())
    return best_tokens(_gumbel_argmax_kernel, gumbel_launch(), logits, *keys, enable_fp_fusion=False)


@triton.jit
def _gumbel_argmax_kernel(
    logits_ptr,  # [N, V], float32
    seeds_ptr,  # [N], int64
    positions_ptr,  # [N], int64
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
    noise = token_noise(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tokens)
    tl.store(ranks_ptr + row * tl.num_programs(1) + block, tl.max(ranked(values + noise, tokens)))


def choose_tokens(
    logits: torch.Tensor,
    is_known: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See `Operations.choose_tokens`. Logits are read twice as they are, the second time for rows with a draw alone,
    and written never: the maximum must be known before the first score is.
    """
    num_rows, vocab_size = logits.shape
    chosen = torch.empty(2, num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return chosen
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    launch = gumbel_launch()
    num_blocks = triton.cdiv(vocab_size, launch.columns)
    ranks = torch.empty(2, num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    options = {"BLOCK": launch.columns, "num_warps": launch.num_warps}
    grid = (num_rows, num_blocks)
    best = best_of_blocks_launch(num_blocks)
    _rank_kernel[grid](logits, is_known, ranks, vocab_size, logits.stride(0), **options)
    _draw_kernel[grid](
        *(logits, is_known, temperatures, seeds, positions, ranks, vocab_size, logits.stride(0)),
        **options,
        BLOCKS=best.columns,
        enable_fp_fusion=False,
    )
    _pick_kernel[(num_rows,)](ranks, temperatures, chosen, num_blocks, BLOCK=best.columns, num_warps=best.num_warps)
    return chosen


@triton.jit
def _load_known(logits_ptr, is_known_ptr, tokens, vocab_size):
    """float32 logits of one row at these tokens, all of them and with -inf where a token is not known."""
    is_token = tokens < vocab_size
    values = tl.load(logits_ptr + tokens, mask=is_token, other=-float("inf")).to(tl.float32)
    is_known = tl.load(is_known_ptr + tokens, mask=is_token, other=0)
    return values, tl.where(is_known != 0, values, -float("inf"))


@triton.jit
def _rank_kernel(
    logits_ptr,  # [N, V], float32 or model dtype
    is_known_ptr,  # [V], bool
    ranks_ptr,  # [2, N, number of blocks], int64, output: the first half
    vocab_size,
    stride_logits_row,
    BLOCK: tl.constexpr,
):
    """The best known token of one block; a block that holds a NaN or +inf ranks above every other.

    Grid: (rows, blocks of the vocabulary).
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values, known = _load_known(logits_ptr + row * stride_logits_row, is_known_ptr, tokens, vocab_size)
    rank = tl.max(ranked(known, tokens))
    rank = tl.where(tl.max(ordered(values)) >= INFINITY_KEY, 0x7FFFFFFFFFFFFFFF, rank)
    tl.store(ranks_ptr + row * tl.num_programs(1) + block, rank)


@triton.jit
def _draw_kernel(
    logits_ptr,  # [N, V], float32 or model dtype
    is_known_ptr,  # [V], bool
    temperatures_ptr,  # [N], float32
    seeds_ptr,  # [N], int64
    positions_ptr,  # [N], int64
    ranks_ptr,  # [2, N, number of blocks], int64: the first half is read, the second the output
    vocab_size,
    stride_logits_row,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The best score of one block, if the row has a draw.

    Grid: (rows, blocks of the vocabulary).
    """
    row = tl.program_id(0).to(tl.int64)
    block, num_blocks = tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures_ptr + row)
    blocks = tl.arange(0, BLOCKS)
    tops = tl.load(ranks_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=LOWEST_RANK)
    key = (tl.max(tops) >> 32).to(tl.int32)
    if (temperature == 0.0) | (key <= MINUS_INFINITY_KEY) | (key >= INFINITY_KEY):
        return
    top = value_of(key)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    _, known = _load_known(logits_ptr + row * stride_logits_row, is_known_ptr, tokens, vocab_size)
    noise = token_noise(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tokens)
    scores = tl.div_rn(known - top, tl.zeros_like(known) + temperature) + noise  # `/` is not correctly rounded
    out_ptrs = ranks_ptr + (tl.num_programs(0) + row) * num_blocks + block
    tl.store(out_ptrs, tl.max(ranked(scores, tokens)))


@triton.jit
def _pick_kernel(
    ranks_ptr,  # [2, N, num_blocks], int64: by logit, and by score where a row has a draw
    temperatures_ptr,  # [N], float32
    chosen_ptr,  # [2, N], int64, output
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Grid: (rows,)."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    blocks = tl.arange(0, BLOCK)
    is_block = blocks < num_blocks
    is_drawn = tl.load(temperatures_ptr + row) != 0.0
    top = tl.max(tl.load(ranks_ptr + row * num_blocks + blocks, mask=is_block, other=LOWEST_RANK))
    half = tl.where(is_drawn, num_rows.to(tl.int64), 0)
    rank = tl.max(tl.load(ranks_ptr + (half + row) * num_blocks + blocks, mask=is_block, other=LOWEST_RANK))
    key = (top >> 32).to(tl.int32)
    is_sound = (key > MINUS_INFINITY_KEY) & (key < INFINITY_KEY)
    token = tl.where(is_sound, token_of_rank(rank), 0)
    tl.store(chosen_ptr + row, token)
    tl.store(chosen_ptr + num_rows + row, tl.where(is_sound, token, -1))


@triton.jit
def token_noise(seed, position, tokens):
    """The specification's noise. seed, position int64 (of any one shape), tokens int32 -> float32."""
    bits = _mix(_key(seed, position, KEY_START_FIRST) + tokens.to(tl.uint32) * TOKEN_STEP)
    bits = _mix(bits ^ _key(seed, position, KEY_START_SECOND))
    uniform = ((bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    uniform = tl.minimum(uniform, 1 - 2.0**-24)
    mantissa, exponent = _split(1.0 - uniform)
    # Where 1 - v lies in [sqrt(1/2), 1], it has lost low bits that v itself still has.
    exponential = -_series(tl.where(exponent == 0.0, -uniform, mantissa - 1.0), exponent)
    mantissa, exponent = _split(exponential)
    return -_series(mantissa - 1.0, exponent)


@triton.jit
def _key(seed, position, START: tl.constexpr):
    key = _mix(seed.to(tl.uint32) + START)
    key = _mix(key ^ (seed >> 32).to(tl.uint32))
    key = _mix(key + position.to(tl.uint32))
    return _mix(key ^ (position >> 32).to(tl.uint32))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * MIX_FIRST
    x = (x ^ (x >> 15)) * MIX_SECOND
    return x ^ (x >> 16)


@triton.jit
def _split(x):
    """x > 0 -> mantissa in (sqrt(1/2), sqrt(2)] and exponent, both float32."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    large = mantissa > SQRT2
    exponent = (bits >> 23) - 127 + large.to(tl.int32)
    return tl.where(large, mantissa * 0.5, mantissa), exponent.to(tl.float32)


@triton.jit
def _series(f, exponent):
    z = f * f
    p = f * COEFFICIENTS[0] + COEFFICIENTS[1]
    for i in tl.static_range(2, NUM_COEFFICIENTS):
        p = p * f + COEFFICIENTS[i]
    y = (f * z) * p
    y = y + exponent * LN2_LOW
    y = y - 0.5 * z
    return (f + y) + exponent * LN2_HIGH


def gumbel_launch() -> TileLaunch:
    """16 tokens a thread: about 100 instructions a token bind it, not memory; the row's keys cost 60 a program."""
    return TileLaunch(1, NARROW_BLOCK, num_warps=4)
