"""Floats as integers that sort alike: comparisons with NaN and ties settled once, for all vocabulary kernels."""

from __future__ import annotations

import triton
import triton.language as tl

NAN_KEY = tl.constexpr(0x7FFFFFFF)
INFINITY_KEY = tl.constexpr(0x7F800000)
MINUS_ZERO_KEY = tl.constexpr(-1)
MINUS_INFINITY_KEY = tl.constexpr(-0x7F800001)
LOWEST_KEY = tl.constexpr(-0x80000000)  # below the key of every float


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
