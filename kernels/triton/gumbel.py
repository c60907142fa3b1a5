"""Draws tokens by Gumbel-max with a seed: `kernels.gumbel_noise` to the bit, so launched without fused multiply-add."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import gumbel_noise as spec
from kernels.triton.launch import TileLaunch
from kernels.triton.sampling import NARROW_BLOCK, best_tokens, ranked

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
