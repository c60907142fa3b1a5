"""Finds which tokens top-k, top-p and min-p leave of the next-token distribution, without a sort.

Tokens stay from a score on, as a key (see `ordered`): the largest key from which k tokens lie, or tokens of the
nucleus' mass. Its 32 bits are found two at a time, by counting. A mass is exp(score) as an integer, in units of
2**-MASS_BITS, so that sums do not depend on their order and equal scores weigh the same. Logits are read as they are: a
score, (logit - largest) / temperature, is computed where it is read. Two kernels:

1. `_collect_candidates_kernel` writes down the scores among which the key is. With top-k these reach the k-th largest
   of the maxima of as many groups of tokens as there are lanes: k tokens at least, and few more (k of 151,936 tokens
   mostly lie in different ones of 8192 groups). Without, they weigh at least the average of what may be dropped: what
   weighs less may be dropped together.
2. `_find_thresholds_kernel` searches among those.

A row is read twice, and some 20 times what is left of it. A tie across the nucleus' edge takes one pass more.

The tokens are the reference's, with one reservation: its cumulative mass is a float32 sum, this one is exact but for
the rounding of exp. Tokens whose cumulative mass is within about 1e-6 of 1 - top_p, or whose share is within a rounding
step of min_p, may fall on the other side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.operands import Truncation
from kernels.triton.launch import TileLaunch
from kernels.triton.sampling import (
    INFINITY_KEY,
    LOWEST_KEY,
    MINUS_INFINITY_KEY,
    best_of_blocks_launch,
    key_of_best,
    load_known,
    ordered,
    value_of,
)

# What is 29.8 below the largest score weighs nothing; the sum over less than 2**20 scores fits an int64.
MASS_BITS = 43

MAX_VOCAB_SIZE = 2 ** (63 - MASS_BITS) - 1

MASS_UNITS = tl.constexpr(2.0**MASS_BITS)


def find_thresholds(
    logits: torch.Tensor,
    is_known: torch.Tensor,
    temperatures: torch.Tensor,
    ranks: torch.Tensor,
    truncation: Truncation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of scores below which top-k and top-p drop tokens, and of that key the last id that stays, [N] int32.

    Nothing is dropped of rows with both off, without a draw, or with a NaN or an infinity above all. ranks: of the best
    of each block, [N, blocks]; the others, contiguous, as of `choose_tokens`. Raises ValueError for a vocabulary of
    2**20 tokens or more.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"logits have {vocab_size} tokens a row; accepted: up to {MAX_VOCAB_SIZE}")
    top_k, top_p = truncation.top_k.contiguous(), truncation.top_p.contiguous()
    collect, search = collect_launch(vocab_size, logits.itemsize), search_launch(vocab_size)
    best = best_of_blocks_launch(ranks.shape[1])
    candidates = torch.empty(num_rows, triton.cdiv(vocab_size, 16) * 16 + 16, dtype=torch.float32, device=logits.device)
    totals = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    num_candidates, lowest_keys, last_equals = (  # aligned alike for any number of rows
        torch.empty(num_rows, dtype=torch.int32, device=logits.device) for _ in range(3)
    )
    row = (logits, is_known, temperatures, ranks, top_k, top_p)
    sizes = (vocab_size, logits.stride(0), ranks.shape[1], candidates.stride(0))
    for kernel, launch, outputs in (
        (_collect_candidates_kernel, collect, (totals,)),
        (_find_thresholds_kernel, search, (totals, lowest_keys, last_equals)),
    ):
        kernel[(num_rows,)](
            *(*row, candidates, num_candidates, *outputs, *sizes),
            BLOCK=launch.columns,
            BLOCKS=best.columns,
            NUM_STAGES=launch.num_stages,
            num_warps=launch.num_warps,
        )
    return lowest_keys, last_equals


@triton.jit
def _collect_candidates_kernel(
    logits_ptr,  # [N, V], float32 or model dtype
    is_known_ptr,  # [V], bool
    temperatures_ptr,  # [N], float32
    ranks_ptr,  # [N, num_blocks], int64
    top_k_ptr,  # [N], int64
    top_p_ptr,  # [N], float32
    candidates_ptr,  # [N, stride_candidates_row], float32, output: the scores that may stay, and -inf behind them
    num_candidates_ptr,  # [N], int32, output: how many there are; -1: nothing is dropped
    totals_ptr,  # [N], int64, output: the mass of the row, where only a nucleus is asked for
    vocab_size,
    stride_logits_row,
    num_blocks,
    stride_candidates_row,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    temperature = tl.load(temperatures_ptr + row)
    key = key_of_best(ranks_ptr + row * num_blocks, num_blocks, BLOCKS)
    is_off = (top_k >= vocab_size) & (top_p >= 1.0)
    if is_off | (temperature == 0.0) | (key <= MINUS_INFINITY_KEY) | (key >= INFINITY_KEY):
        tl.store(num_candidates_ptr + row, -1)
        return
    top = value_of(key)
    logits_ptr += row * stride_logits_row
    candidates_ptr += row * stride_candidates_row
    lanes = tl.arange(0, BLOCK)
    floor = tl.full((), LOWEST_KEY, tl.int32)
    least_mass = tl.full((), 0, tl.int64)
    if top_k < vocab_size:
        maxima = tl.full((BLOCK,), LOWEST_KEY, tl.int32)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
            keys = ordered(scores_at(logits_ptr, is_known_ptr, start + lanes, vocab_size, top, temperature))
            maxima = tl.maximum(maxima, keys)
        for bit in range(32):
            raised = floor + (tl.full((), 1, tl.int32) << (31 - bit))  # wraps around from the lowest int32 to 0
            floor = tl.where(tl.sum((maxima >= raised).to(tl.int32)) >= top_k, raised, floor)
    else:
        masses = tl.zeros((BLOCK,), tl.int64)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
            masses += mass_of(scores_at(logits_ptr, is_known_ptr, start + lanes, vocab_size, top, temperature))
        total = tl.sum(masses)
        tl.store(totals_ptr + row, total)
        least_mass = (total - nucleus_mass(total, top_p)) // vocab_size
    # Without what is out already: a row of few tokens left is searched as one of few candidates.
    floor = tl.maximum(floor, MINUS_INFINITY_KEY + 1)
    num_candidates = tl.full((), 0, tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        scores = scores_at(logits_ptr, is_known_ptr, start + lanes, vocab_size, top, temperature)
        chosen = ((ordered(scores) >= floor) & (mass_of(scores) >= least_mass)).to(tl.int32)
        slots = num_candidates + tl.cumsum(chosen, 0) - 1
        tl.store(candidates_ptr + slots, scores, mask=chosen > 0)
        num_candidates += tl.sum(chosen)
    # Up to a multiple of 16, so that the search copies 16 bytes at once.
    tl.store(candidates_ptr + num_candidates + tl.arange(0, 16), -float("inf"))
    tl.store(num_candidates_ptr + row, num_candidates)


@triton.jit
def _find_thresholds_kernel(
    logits_ptr,  # [N, V], float32 or model dtype
    is_known_ptr,  # [V], bool
    temperatures_ptr,  # [N], float32
    ranks_ptr,  # [N, num_blocks], int64
    top_k_ptr,  # [N], int64
    top_p_ptr,  # [N], float32
    candidates_ptr,  # [N, stride_candidates_row], float32
    num_candidates_ptr,  # [N], int32
    totals_ptr,  # [N], int64
    lowest_keys_ptr,  # [N], int32, output: tokens of lower keys are dropped
    last_equals_ptr,  # [N], int32, output: of that key, tokens of higher ids are dropped
    vocab_size,
    stride_logits_row,
    num_blocks,
    stride_candidates_row,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    num_candidates = tl.load(num_candidates_ptr + row)
    lowest_key = tl.full((), LOWEST_KEY, tl.int32)
    last_equal = vocab_size
    if num_candidates >= 0:
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        values_ptr = candidates_ptr + row * stride_candidates_row
        num_values = tl.cdiv(num_candidates, 16) * 16  # filled up with -inf
        total = tl.full((), 0, tl.int64)
        if top_k < vocab_size:
            lowest_key = threshold(values_ptr, num_values, top_k, False, BLOCK, NUM_STAGES)
        if top_p < 1.0:
            if top_k < vocab_size:
                below = tl.maximum(lowest_key, LOWEST_KEY + 1) - 1
                total, _ = tail_sums(values_ptr, num_values, below, BLOCK, NUM_STAGES)
            else:
                total = tl.load(totals_ptr + row)
            mass = nucleus_mass(total, top_p)
            # Not below the k-th: the tokens from there on alone have all of `total`.
            lowest_key = threshold(values_ptr, num_values, mass, True, BLOCK, NUM_STAGES)
            above, num_equals = tail_sums(values_ptr, num_values, lowest_key, BLOCK, NUM_STAGES)
            num_kept = tl.cdiv(mass - above, mass_of(value_of(lowest_key)))
            if num_kept < num_equals:
                top = value_of(key_of_best(ranks_ptr + row * num_blocks, num_blocks, BLOCKS))
                logits_ptr += row * stride_logits_row
                temperature = tl.load(temperatures_ptr + row)
                lanes = tl.arange(0, BLOCK)
                last = tl.full((BLOCK,), -1, tl.int32)
                num_before = tl.full((), 0, tl.int32)
                for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
                    scores = scores_at(logits_ptr, is_known_ptr, start + lanes, vocab_size, top, temperature)
                    equal = (ordered(scores) == lowest_key).to(tl.int32)
                    places = num_before + tl.cumsum(equal, 0)
                    last = tl.where((equal > 0) & (places <= num_kept), start + lanes, last)
                    num_before += tl.sum(equal)
                last_equal = tl.max(last)
    tl.store(lowest_keys_ptr + row, lowest_key)
    tl.store(last_equals_ptr + row, last_equal)


@triton.jit
def scores_at(logits_ptr, is_known_ptr, tokens, vocab_size, top, temperature):
    """(logit - top) / temperature of one row at these tokens, -inf where one is not known or past the vocabulary."""
    _, known = load_known(logits_ptr, is_known_ptr, tokens, vocab_size)
    return tl.div_rn(known - top, temperature)  # `/` is not rounded correctly


@triton.jit
def dropped(scores, tokens, lowest_key, last_equal, min_p):
    """Whether these scores, at most 0, are not among what stays."""
    keys = ordered(scores)
    is_below = (keys < lowest_key) | ((keys == lowest_key) & (tokens > last_equal))
    return is_below | (tl.exp(scores) < min_p)


@triton.jit
def mass_of(scores):
    """scores float32 at most 0 -> int64."""
    return (tl.exp(scores) * MASS_UNITS).to(tl.int64)


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
def tail_sums(values_ptr, num_values, key, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """-> the mass of values above `key`, int64, and the number of those that equal it, int32."""
    lanes = tl.arange(0, BLOCK)
    masses = tl.zeros((BLOCK,), tl.int64)
    num_equals = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, num_values, BLOCK, num_stages=NUM_STAGES):
        values = tl.load(values_ptr + start + lanes, mask=start + lanes < num_values, other=-float("inf"))
        keys = ordered(values)
        masses += tl.where(keys > key, mass_of(values), 0)
        num_equals += ((keys == key) & (start + lanes < num_values)).to(tl.int32)
    return tl.sum(masses), tl.sum(num_equals)


@triton.jit
def threshold(
    values_ptr,
    num_values,
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
            weights = mass_of(values) if BY_MASS else inside.to(tl.int64)
            from_first += tl.where(keys >= first, weights, 0)
            from_second += tl.where(keys >= second, weights, 0)
            from_third += tl.where(keys >= third, weights, 0)
        digit = (tl.sum(from_first) >= target).to(tl.int32)
        digit += (tl.sum(from_second) >= target).to(tl.int32)
        digit += (tl.sum(from_third) >= target).to(tl.int32)
        found += digit * step
    return found


def collect_launch(vocab_size: int, itemsize: int) -> TileLaunch:
    """One program a row, so 64 rows use half of the GPU: each has 512 threads, and two blocks of 16 KiB in flight.

    The block is also the number of groups. Of 32 KiB two blocks took 104 KiB of shared memory, more than 8.9 has.
    """
    columns = min(16_384 // itemsize, max(triton.next_power_of_2(vocab_size), 128))
    return TileLaunch(1, columns, num_warps=16, num_stages=3)


def search_launch(vocab_size: int) -> TileLaunch:
    """The candidates of most rows (little more than top_k, or some hundred) fit one block; three more are in flight.

    8 tokens a thread, each with three sums of int64, take nearly all of the 128 registers that 16 warps leave.
    """
    return TileLaunch(1, min(4096, max(triton.next_power_of_2(vocab_size), 128)), num_warps=16, num_stages=4)
