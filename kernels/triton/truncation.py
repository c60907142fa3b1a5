"""Cuts the tail of the next-token distribution without a sort: top-k, top-p, min-p.

Tokens stay from a key on (see `ordered`): the largest key from which k tokens lie, or tokens of the nucleus' mass. Its
32 bits are found two at a time, by counting. A mass is exp(value - top) as an integer, in units of 2**-MASS_BITS, so
that sums do not depend on their order and equal values weigh the same. Three kernels:

1. `_collect_candidates_kernel` takes the maxima of as many groups of tokens as there are lanes. The k-th largest of
   them is a floor that at least k tokens reach and few more (k of 151,936 tokens mostly lie in different ones of 8192
   groups); these are copied out. Without top-k the floor is the maximum of rank BLOCK / 4.
2. `_find_thresholds_kernel` searches among those candidates; in the whole row where there are too many for their place,
   or where without top-k they have less than the nucleus' mass.
3. `_mask_kernel` writes -inf.

A row is read three times with top-k, four with top-p alone, and 16 times more for a search in the whole row: top-k
beyond the number of groups, or a nucleus of thousands of tokens. A tie across the nucleus' edge takes one more.

The tokens are the reference's, with one reservation: its cumulative mass is a float32 sum, this one is exact but for
the rounding of exp. Tokens whose cumulative mass is within about 1e-6 of 1 - top_p, or whose share is within a rounding
step of min_p, may fall on the other side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launch import TileLaunch
from kernels.triton.sampling import (
    LOWEST_KEY,
    MINUS_INFINITY_KEY,
    NAN_KEY,
    NARROW_BLOCK,
    is_finite,
    ordered,
    value_of,
)

# What is 29.8 below the largest value weighs nothing; the sum over less than 2**20 values fits an int64.
MASS_BITS = 43

MAX_VOCAB_SIZE = 2 ** (63 - MASS_BITS) - 1

MASS_UNITS = tl.constexpr(2.0**MASS_BITS)


def mask_top_k_top_p_min_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> None:
    """See `Operations.mask_top_k_top_p_min_p`. Rows with all three off are not touched.

    Raises ValueError for a vocabulary of 2**20 tokens or more, and for logits whose rows are not contiguous.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"logits have {vocab_size} tokens a row; accepted: up to {MAX_VOCAB_SIZE}")
    if logits.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.stride()}; accepted: a last stride of 1")
    if num_rows == 0:
        return
    top_k, top_p, min_p = top_k.contiguous(), top_p.contiguous(), min_p.contiguous()
    collect, search, mask = collect_launch(vocab_size), search_launch(vocab_size), mask_launch()
    candidates = torch.empty(num_rows, collect.columns, dtype=torch.float32, device=logits.device)
    tops = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    num_candidates, lowest_keys, last_equals = (
        torch.empty(num_rows, dtype=torch.int32, device=logits.device) for _ in range(3)
    )
    vocabulary = (vocab_size, logits.stride(0))
    _collect_candidates_kernel[(num_rows,)](
        *(logits, top_k, top_p, min_p, candidates, num_candidates, tops, *vocabulary),
        BLOCK=collect.columns,
        NUM_STAGES=collect.num_stages,
        num_warps=collect.num_warps,
    )
    _find_thresholds_kernel[(num_rows,)](
        *(logits, top_k, top_p, candidates, num_candidates, tops, lowest_keys, last_equals, *vocabulary),
        stride_candidates_row=collect.columns,
        BLOCK=search.columns,
        NUM_STAGES=search.num_stages,
        num_warps=search.num_warps,
    )
    _mask_kernel[(num_rows, triton.cdiv(vocab_size, mask.columns))](
        *(logits, top_k, top_p, min_p, tops, lowest_keys, last_equals, *vocabulary),
        BLOCK=mask.columns,
        num_warps=mask.num_warps,
    )


@triton.jit
def _collect_candidates_kernel(
    logits_ptr,  # [N, V], float32
    top_k_ptr,  # [N], int64
    top_p_ptr,  # [N], float32
    min_p_ptr,  # [N], float32
    candidates_ptr,  # [N, BLOCK], float32, output: the logits that may stay, then -inf
    num_candidates_ptr,  # [N], int32, output: how many there are, also where they are more than BLOCK
    tops_ptr,  # [N], float32, output: the largest logit, NaN if there is one
    vocab_size,
    stride_logits_row,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits_row
    top_k = tl.load(top_k_ptr + row)
    has_threshold = (top_k < vocab_size) | (tl.load(top_p_ptr + row) < 1.0)
    if (tl.load(min_p_ptr + row) <= 0.0) & (has_threshold == 0):
        return
    lanes = tl.arange(0, BLOCK)
    maxima = tl.full((BLOCK,), LOWEST_KEY, tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        inside = start + lanes < vocab_size
        keys = ordered(tl.load(logits_ptr + start + lanes, mask=inside, other=0.0))
        maxima = tl.maximum(maxima, tl.where(inside, keys, LOWEST_KEY))
    tl.store(tops_ptr + row, value_of(tl.max(maxima)))
    if has_threshold == 0:
        return
    rank = tl.where(top_k < vocab_size, top_k, BLOCK // 4)
    floor = tl.full((), LOWEST_KEY, tl.int32)
    for bit in range(32):
        raised = floor + (tl.full((), 1, tl.int32) << (31 - bit))  # wraps around from the lowest int32 to 0
        floor = tl.where(tl.sum((maxima >= raised).to(tl.int32)) >= rank, raised, floor)
    # Without what is out already: a row of few tokens left is searched as one of few candidates.
    floor = tl.maximum(floor, MINUS_INFINITY_KEY + 1)
    num_candidates = tl.full((), 0, tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        values = tl.load(logits_ptr + start + lanes, mask=start + lanes < vocab_size, other=-float("inf"))
        chosen = (ordered(values) >= floor).to(tl.int32)
        slots = num_candidates + tl.cumsum(chosen, 0) - 1
        tl.store(candidates_ptr + row * BLOCK + slots, values, mask=(chosen > 0) & (slots < BLOCK))
        num_candidates += tl.sum(chosen)
    # Up to a multiple of 16, so that the search copies 16 bytes at once.
    filling = (lanes >= num_candidates) & (lanes < num_candidates + 15)
    tl.store(candidates_ptr + row * BLOCK + lanes, -float("inf"), mask=filling)
    tl.store(num_candidates_ptr + row, num_candidates)


@triton.jit
def _find_thresholds_kernel(
    logits_ptr,  # [N, V], float32
    top_k_ptr,  # [N], int64
    top_p_ptr,  # [N], float32
    candidates_ptr,  # [N, stride_candidates_row], float32
    num_candidates_ptr,  # [N], int32
    tops_ptr,  # [N], float32
    lowest_keys_ptr,  # [N], int32, output: tokens of lower keys are dropped
    last_equals_ptr,  # [N], int32, output: of that key, tokens of higher ids are dropped
    vocab_size,
    stride_logits_row,
    stride_candidates_row,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits_row
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    lowest_key = tl.full((), LOWEST_KEY, tl.int32)
    last_equal = vocab_size
    if (top_k < vocab_size) | (top_p < 1.0):
        top = tl.load(tops_ptr + row)
        values_ptr = candidates_ptr + row * stride_candidates_row
        num_values = tl.cdiv(tl.load(num_candidates_ptr + row), 16) * 16  # filled up with -inf
        if num_values > stride_candidates_row:
            values_ptr = logits_ptr
            num_values = vocab_size
        if top_k < vocab_size:
            lowest_key = threshold(values_ptr, num_values, top, top_k, False, BLOCK, NUM_STAGES)
            # Nothing compares below a k-th largest that is NaN.
            lowest_key = tl.where(lowest_key == NAN_KEY, LOWEST_KEY, lowest_key)
        # The softmax of a row with a NaN or +inf is NaN, and drops nothing; a row of -inf has nothing to drop.
        if (top_p < 1.0) & is_finite(top):
            if top_k < vocab_size:
                below = tl.maximum(lowest_key, LOWEST_KEY + 1) - 1
                total, _ = tail_sums(values_ptr, num_values, top, below, BLOCK, NUM_STAGES)
            else:
                total, _ = tail_sums(logits_ptr, vocab_size, top, LOWEST_KEY, BLOCK, NUM_STAGES)
                collected, _ = tail_sums(values_ptr, num_values, top, LOWEST_KEY, BLOCK, NUM_STAGES)
                if collected < nucleus_mass(total, top_p):
                    values_ptr = logits_ptr
                    num_values = vocab_size
            mass = nucleus_mass(total, top_p)
            # Not below the k-th: the tokens from there on alone have all of `total`.
            lowest_key = threshold(values_ptr, num_values, top, mass, True, BLOCK, NUM_STAGES)
            above, num_equals = tail_sums(values_ptr, num_values, top, lowest_key, BLOCK, NUM_STAGES)
            num_kept = tl.cdiv(mass - above, mass_of(value_of(lowest_key), top))
            if num_kept < num_equals:
                last_equal = _token_of_equal(logits_ptr, vocab_size, lowest_key, num_kept, BLOCK, NUM_STAGES)
    tl.store(lowest_keys_ptr + row, lowest_key)
    tl.store(last_equals_ptr + row, last_equal)


@triton.jit
def _token_of_equal(logits_ptr, vocab_size, key, place, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """The id of the `place`-th token, from 1, that has this key."""
    lanes = tl.arange(0, BLOCK)
    last = tl.full((BLOCK,), -1, tl.int32)
    num_before = tl.full((), 0, tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        values = tl.load(logits_ptr + start + lanes, mask=start + lanes < vocab_size, other=-float("inf"))
        equal = (ordered(values) == key).to(tl.int32)
        places = num_before + tl.cumsum(equal, 0)
        last = tl.where((equal > 0) & (places <= place), start + lanes, last)
        num_before += tl.sum(equal)
    return tl.max(last)


@triton.jit
def _mask_kernel(
    logits_ptr,  # [N, V], float32, in place
    top_k_ptr,  # [N], int64
    top_p_ptr,  # [N], float32
    min_p_ptr,  # [N], float32
    tops_ptr,  # [N], float32
    lowest_keys_ptr,  # [N], int32
    last_equals_ptr,  # [N], int32
    vocab_size,
    stride_logits_row,
    BLOCK: tl.constexpr,
):
    """Grid: (rows, blocks of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    min_p = tl.load(min_p_ptr + row)
    if (min_p <= 0.0) & (tl.load(top_p_ptr + row) >= 1.0) & (tl.load(top_k_ptr + row) >= vocab_size):
        return
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    values = tl.load(logits_ptr + row * stride_logits_row + tokens, mask=inside, other=0.0)
    keys = ordered(values)
    lowest_key = tl.load(lowest_keys_ptr + row)
    dropped = (keys < lowest_key) | ((keys == lowest_key) & (tokens > tl.load(last_equals_ptr + row)))
    top = tl.load(tops_ptr + row)
    # The softmax of a row with a NaN or +inf is NaN, and drops nothing.
    dropped |= tl.exp(values - top) < tl.where(is_finite(top), min_p, 0.0)
    tl.store(logits_ptr + row * stride_logits_row + tokens, -float("inf"), mask=inside & dropped)


@triton.jit
def mass_of(values, top):
    """values float32 at most `top`, which is finite -> int64."""
    return (tl.exp(values - top) * MASS_UNITS).to(tl.int64)


@triton.jit
def nucleus_mass(total, top_p):
    """Mass that must stay: what is dropped has at most 1 - top_p of the total, and something stays.

    To 1 - top_p half a float32 step is added, since shares up to there round to it in a float32 sum. So 0.3 of 10 equal
    tokens are 3, although the float32 nearest to 1 - 0.3 is less than the mass of 7.
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
    """-> the largest key from which `target` values lie, or values of that mass; LOWEST_KEY if there is none.

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


def collect_launch(vocab_size: int) -> TileLaunch:
    """One program a row, so 64 rows use half of the GPU: each has 512 threads and two blocks, 64 KiB, in flight.

    The block is also the number of groups, and the room for candidates.
    """
    return TileLaunch(1, min(8192, max(triton.next_power_of_2(vocab_size), 128)), num_warps=16, num_stages=3)


def search_launch(vocab_size: int) -> TileLaunch:
    """The candidates of most rows (little more than top_k, or 2048) fit one block; up to three more are in flight.

    8 tokens a thread, each with three sums of int64, take nearly all of the 128 registers that 16 warps leave.
    """
    return TileLaunch(1, min(4096, max(triton.next_power_of_2(vocab_size), 128)), num_warps=16, num_stages=4)


def mask_launch() -> TileLaunch:
    """16 tokens a thread; a row of 151,936 tokens takes 75 programs."""
    return TileLaunch(1, NARROW_BLOCK, num_warps=4)
