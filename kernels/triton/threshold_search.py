"""Device functions of `truncation`: which of a row's values stay, found by counting and summing instead of sorting.

Values are compared by their keys (`ordered_floats`). A mass is exp(value - top) in units of 2**-MASS_BITS, an integer:
a sum of integers has no order, so it is exact, reproducible, and equal values weigh the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.ordered_floats import LOWEST_KEY, ordered

# What is 29.8 below the largest value weighs nothing; the sum over less than 2**20 values fits an int64.
MASS_BITS = 43
MASS_UNITS = tl.constexpr(2.0**MASS_BITS)


@triton.jit
def mass_of(values, top):
    """values float32 at most `top`, which is finite -> int64."""
    return (tl.exp(values - top) * MASS_UNITS).to(tl.int64)


@triton.jit
def nucleus_mass(total, top_p):
    """Mass that must stay: what is dropped has at most 1 - top_p of the total, and something stays.

    Half a float32 step more than 1 - top_p: shares up to there round to it, as in a float32 sum. So 0.3 of 10
    equal tokens are 3, although the float32 nearest to 1 - 0.3 is less than the mass of 7.
    """
    share = 1.0 - top_p
    next_share = (share.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    limit = (share.to(tl.float64) + next_share.to(tl.float64)) * 0.5
    return tl.maximum(total - (limit * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def tail_sums(values_ptr, num_values, top, key, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """-> the mass of values above `key`, int64, and the number of those that equal it, int32."""
    lanes = tl.arange(0, BLOCK)
    masses = tl.zeros((BLOCK,), tl.int64)
    num_equals = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, num_values, BLOCK, num_stages=NUM_STAGES):
        values = tl.load(values_ptr + start + lanes, mask=start + lanes < num_values, other=-float("inf"))
        keys = ordered(values)
        masses += tl.where(keys > key, mass_of(values, top), 0)
        num_equals += ((keys == key) & (start + lanes < num_values)).to(tl.int32)
    return tl.sum(masses), tl.sum(num_equals)


@triton.jit
def threshold(
    values_ptr,
    num_values,
    top,
    target,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """-> the largest key such that the values from it on number `target`, or weigh it; LOWEST_KEY if there is none.

    Two bits of the key a round: three sums over the values.
    """
    lanes = tl.arange(0, BLOCK)
    found = tl.full((), LOWEST_KEY, tl.int32)
    for digits in range(16):
        step = tl.full((), 1, tl.int32) << (30 - 2 * digits)
        # `found + 3 * step` wraps around as it should: from the lowest int32 up to the highest.
        first, second, third = found + step, found + step * 2, found + step * 3
        from_first = tl.zeros((BLOCK,), tl.int64)
        from_second = tl.zeros((BLOCK,), tl.int64)
        from_third = tl.zeros((BLOCK,), tl.int64)
        for start in tl.range(0, num_values, BLOCK, num_stages=NUM_STAGES):
            inside = start + lanes < num_values
            values = tl.load(values_ptr + start + lanes, mask=inside, other=-float("inf"))
            keys = ordered(values)
            weights = mass_of(values, top) if BY_MASS else inside.to(tl.int64)
            from_first += tl.where(keys >= first, weights, 0)
            from_second += tl.where(keys >= second, weights, 0)
            from_third += tl.where(keys >= third, weights, 0)
        digit = (tl.sum(from_first) >= target).to(tl.int32)
        digit += (tl.sum(from_second) >= target).to(tl.int32)
        digit += (tl.sum(from_third) >= target).to(tl.int32)
        found += digit * step
    return found
