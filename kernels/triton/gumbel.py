"""Draws tokens by Gumbel-max with a seed: `kernels.gumbel_noise` to the bit, so launched without fused multiply-add."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import gumbel_noise as spec
from kernels.operands import Truncation
from kernels.triton.launch import TileLaunch
from kernels.triton.sampling import (
    INFINITY_KEY,
    LOWEST_KEY,
    LOWEST_RANK,
    MINUS_INFINITY_KEY,
    NARROW_BLOCK,
    best_of_blocks_launch,
    key_of_best,
    load_known,
    ranked,
    token_of_rank,
    value_of,
)
from kernels.triton.truncation import dropped, find_thresholds

KEY_START_FIRST = tl.constexpr(spec.KEY_START_FIRST)
KEY_START_SECOND = tl.constexpr(spec.KEY_START_SECOND)
MIX_FIRST = tl.constexpr(spec.MIX_FIRST)
MIX_SECOND = tl.constexpr(spec.MIX_SECOND)
TOKEN_STEP = tl.constexpr(spec.TOKEN_STEP)
SQRT2 = tl.constexpr(spec.SQRT2)
LN2_HIGH = tl.constexpr(spec.LN2_HIGH)
LN2_LOW = tl.constexpr(spec.LN2_LOW)
LN2 = tl.constexpr(spec.LN2_HIGH + spec.LN2_LOW)
MAX_NOISE = tl.constexpr(spec.MAX_NOISE)
MIN_NOISE = tl.constexpr(spec.MIN_NOISE)
# From the last to the first, as Horner's scheme takes them.
COEFFICIENTS = tl.constexpr(tuple(reversed(spec.LOG1P_COEFFICIENTS)))
NUM_COEFFICIENTS = tl.constexpr(len(spec.LOG1P_COEFFICIENTS))


@triton.jit
def _best_rank(bounds, tokens, row_ptr, top, temperature, seed, position):
    """The rank of the best token of one block by (its logit - top) / temperature + its noise, none above its bound.

    A bound takes 36 instructions and a score 150; in most blocks one token alone may be the best. NaN, whose bound is
    infinite, ends the search.
    """
    best, best_score = tl.full((), LOWEST_RANK, tl.int64), tl.full((), -float("inf"), tl.float32)
    bound = tl.max(bounds)
    while (bound >= best_score) & (bound > -float("inf")):
        token = tl.min(tl.where(bounds == bound, tokens, 0x7FFFFFFF))
        logit = tl.load(row_ptr + token).to(tl.float32)
        score = tl.div_rn(logit - top, temperature) + token_noise(seed, position, token)  # `/` is not rounded correctly
        best = tl.maximum(best, ranked(score, token))
        best_score = tl.maximum(best_score, score, propagate_nan=tl.PropagateNan.ALL)
        bounds = tl.where(tokens == token, -float("inf"), bounds)
        # A score that is its bound ends it: what has the same bound has a higher id. So do equal logits of 1e9.
        bound = tl.where((score == bound) & (score < float("inf")), -float("inf"), tl.max(bounds))
    return best


def choose_tokens(
    logits: torch.Tensor,
    is_known: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    truncation: Truncation | None = None,
) -> torch.Tensor:
    """See `Operations.choose_tokens`. Logits are read twice as they are, the second time for rows with a draw alone,
    and written never: the maximum must be known before the first score is.
    """
    num_rows, vocab_size = logits.shape
    chosen = torch.empty(2, num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return chosen
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    temperatures, seeds, positions = temperatures.contiguous(), seeds.contiguous(), positions.contiguous()
    launch = choose_launch()
    num_blocks = triton.cdiv(vocab_size, launch.columns)
    ranks = torch.empty(2, num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    options = {"BLOCK": launch.columns, "num_warps": launch.num_warps}
    grid = (num_rows, num_blocks)
    best = best_of_blocks_launch(num_blocks)
    _rank_kernel[grid](logits, is_known, ranks, vocab_size, logits.stride(0), **options)
    limits: tuple[torch.Tensor | None, ...] = (None, None, None)
    if truncation is not None:
        thresholds = find_thresholds(logits, is_known, temperatures, ranks[0], truncation)
        limits = (*thresholds, truncation.min_p.contiguous())
    _draw_kernel[grid](
        *(logits, is_known, temperatures, seeds, positions, *limits, ranks, vocab_size, logits.stride(0)),
        **options,
        BLOCKS=best.columns,
        TRUNCATES=truncation is not None,
        enable_fp_fusion=False,
    )
    _pick_kernel[(num_rows,)](ranks, temperatures, chosen, num_blocks, BLOCK=best.columns, num_warps=best.num_warps)
    return chosen


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

    Compared as floats and ranked last: ranks of all tokens, 64-bit integers, would be twice as many instructions.
    Grid: (rows, blocks of the vocabulary).
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values, known = load_known(logits_ptr + row * stride_logits_row, is_known_ptr, tokens, vocab_size)
    known = tl.where(values < float("inf"), known, float("inf"))
    top = tl.max(known)
    token = tl.min(tl.where(known == top, tokens, 0x7FFFFFFF))
    rank = tl.where(top == float("inf"), 0x7FFFFFFFFFFFFFFF, ranked(top, token))
    tl.store(ranks_ptr + row * tl.num_programs(1) + block, rank)


@triton.jit
def _draw_kernel(
    logits_ptr,  # [N, V], float32 or model dtype
    is_known_ptr,  # [V], bool
    temperatures_ptr,  # [N], float32
    seeds_ptr,  # [N], int64
    positions_ptr,  # [N], int64
    lowest_keys_ptr,  # [N], int32: see `find_thresholds`; None: nothing is dropped
    last_equals_ptr,  # [N], int32, or None
    min_p_ptr,  # [N], float32, 0: off; or None
    ranks_ptr,  # [2, N, number of blocks], int64: the first half is read, the second the output
    vocab_size,
    stride_logits_row,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TRUNCATES: tl.constexpr,
):
    """The best score of what is not dropped of one block, if the row has a draw and the block's best may be the row's.

    Grid: (rows, blocks of the vocabulary).
    """
    row = tl.program_id(0).to(tl.int64)
    block, num_blocks = tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures_ptr + row)
    key = key_of_best(ranks_ptr + row * num_blocks, num_blocks, BLOCKS)
    if (temperature == 0.0) | (key <= MINUS_INFINITY_KEY) | (key >= INFINITY_KEY):
        return
    top = value_of(key)
    factor = tl.minimum(1.0 / temperature, 3e38)  # times 0 it is 0
    rank_ptr = ranks_ptr + row * num_blocks + block
    best_of_block = value_of((tl.load(rank_ptr) >> 32).to(tl.int32))
    rank_ptr += tl.num_programs(0) * num_blocks
    is_out = (best_of_block - top) * factor + MAX_NOISE < MIN_NOISE  # the least score of the row's best token
    if TRUNCATES:
        lowest_key, last_equal = tl.load(lowest_keys_ptr + row), tl.load(last_equals_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        is_out |= dropped(tl.div_rn(best_of_block - top, temperature), 0, lowest_key, last_equal, min_p)
    if is_out:
        tl.store(rank_ptr, LOWEST_RANK)
        return
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row * stride_logits_row
    _, known = load_known(row_ptr, is_known_ptr, tokens, vocab_size)
    if TRUNCATES:  # apart, since it is known when this is compiled  # noqa: SIM102
        if (lowest_key > LOWEST_KEY) | (min_p > 0.0):
            scores = tl.div_rn(known - top, temperature)
            known = tl.where(dropped(scores, tokens, lowest_key, last_equal, min_p), -float("inf"), known)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    # A token below -26 is not the best, and above it the product is less than 1e-5 off.
    bounds = (known - top) * factor + noise_bound(seed, position, tokens)
    tl.store(rank_ptr, _best_rank(bounds, tokens, row_ptr, top, temperature, seed, position))


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
    uniform = tl.minimum(_random(seed, position, tokens) * (2.0**-31), 1 - 2.0**-24)
    mantissa, exponent = _split(1.0 - uniform)
    # Where 1 - v lies in [sqrt(1/2), 1], it has lost low bits that v itself still has.
    exponential = -_series(tl.where(exponent == 0.0, -uniform, mantissa - 1.0), exponent)
    mantissa, exponent = _split(exponential)
    return -_series(mantissa - 1.0, exponent)


@triton.jit
def noise_bound(seed, position, tokens):
    """Above `token_noise`, by 0.09 at most where that is above 3: -log(v) for -log(-log(1 - v)), since -log(1 - v) > v,
    and for log2 of a float its bits as a number, a line from each power of two to the next.

    Not `tl.log2`, which is 14 instructions. Its own roundings and those of a score below 32 come to 2e-5.
    """
    bits = _random(seed, position, tokens).to(tl.int32, bitcast=True)
    return bits.to(tl.float32) * (-LN2 * 2.0**-23) + ((31 + 127) * LN2 + 1e-4)


@triton.jit
def _random(seed, position, tokens):
    """2**31 times the specification's v, without its limit: 0.5 to 2**31, float32."""
    bits = _mix(_key(seed, position, KEY_START_FIRST) + tokens.to(tl.uint32) * TOKEN_STEP)
    bits = _mix(bits ^ _key(seed, position, KEY_START_SECOND))
    return (bits >> 1).to(tl.int32).to(tl.float32) + 0.5


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


def choose_launch() -> TileLaunch:
    """16 tokens a thread, 60 instructions each, of which a third are the block's: the row's keys and one exact score.

    Twice as many tokens would take 48 each, with 96 registers instead of 54.
    """
    return TileLaunch(1, NARROW_BLOCK, num_warps=4)
