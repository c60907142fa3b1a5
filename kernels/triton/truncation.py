"""Finds which tokens top-k, top-p and min-p leave of the next-token distribution, without a sort.

Tokens stay from a score on, as a key (see `ordered`): the largest key from which k tokens lie, or tokens of the
nucleus' mass. Its 32 bits are found two at a time, by counting. A mass is exp(score) as an integer, in units of
2**-MASS_BITS, so that sums do not depend on their order and equal scores weigh the same. Logits are read as they are: a
score, (logit - largest) / temperature, is computed where it is read. Three kernels:

1. `_survey_kernel`, some programs a row, knows the best of each block. The k-th largest of those is a floor that k
   tokens reach, and few more (k of 151,936 tokens mostly lie in different ones of 75 blocks). Where k is larger, or
   top-p alone, a block is counted or weighed from each of LEVELS scores on.
2. `_collect_candidates_kernel`, of the same grid, writes down what reaches the floor, or the lowest level that must be
   reached. With top-p alone what reaches the next level stays and is left out: its mass is known. Blocks whose best is
   below are not read. Candidates are in no order, and nothing depends on it.
3. `_find_thresholds_kernel`, a program a row, searches among those.

So a row is read once or twice, and some 12 to 18 times what is left of it. A tie across the nucleus' edge takes one
pass more. On an H200 64 rows of 151,936 bfloat16 logits take 98 us with a top_k of 50, 165 with 20 and a top_p of 0.95,
339 with a top_p of 0.9 alone, where a plain draw takes 41; one program a row took 287, 380 and 518.

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
    LOWEST_RANK,
    MINUS_INFINITY_KEY,
    NARROW_BLOCK,
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

# A power of two; the last is -inf. Each takes some 10 of the survey's instructions a token. Of normally distributed
# logits at most a third lie between two of them.
LEVELS = tl.constexpr(8)

# Of the first two kernels, each with its share of the blocks. Where no row drops a token, all return at once: 19,200 of
# them, one a block of 256 rows, took 15 us on an H200.
ROW_PROGRAMS = 16


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
    num_blocks, device = ranks.shape[1], logits.device
    top_k, top_p = truncation.top_k.contiguous(), truncation.top_p.contiguous()
    candidates = torch.empty(num_rows, triton.cdiv(vocab_size, 16) * 16, dtype=torch.float32, device=device)
    levels = torch.empty(num_rows, LEVELS.value, dtype=torch.float32, device=device)
    sums = torch.empty(num_rows, num_blocks, LEVELS.value, dtype=torch.int64, device=device)
    num_candidates, lowest_keys, last_equals = (  # aligned alike for any number of rows
        torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(3)
    )
    row = (logits, is_known, temperatures, ranks, top_k, top_p, levels, sums, candidates, num_candidates)
    sizes = (vocab_size, logits.stride(0), num_blocks, candidates.stride(0))
    blocks = best_of_blocks_launch(num_blocks).columns
    collect, search = collect_launch(), search_launch(vocab_size)
    for kernel in (_survey_kernel, _collect_candidates_kernel):
        kernel[num_rows, min(num_blocks, ROW_PROGRAMS)](
            *row, *sizes, BLOCK=collect.columns, BLOCKS=blocks, num_warps=collect.num_warps
        )
    _find_thresholds_kernel[(num_rows,)](
        *(*row, lowest_keys, last_equals, *sizes),
        BLOCK=search.columns,
        BLOCKS=blocks,
        NUM_STAGES=search.num_stages,
        num_warps=search.num_warps,
    )
    return lowest_keys, last_equals


@triton.jit
def _survey_kernel(
    logits_ptr,  # [N, V], float32 or model dtype
    is_known_ptr,  # [V], bool
    temperatures_ptr,  # [N], float32
    ranks_ptr,  # [N, num_blocks], int64
    top_k_ptr,  # [N], int64
    top_p_ptr,  # [N], float32
    levels_ptr,  # [N, LEVELS], float32, output: scores, from the highest; the floor alone where top_k <= num_blocks
    sums_ptr,  # [N, num_blocks, LEVELS], int64, output: see `bracket`
    candidates_ptr,  # not used
    num_candidates_ptr,  # [N], int32, output: 0; -1: nothing is dropped
    vocab_size,
    stride_logits_row,
    num_blocks,
    stride_candidates_row,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid: (rows, programs of a row). What it writes is written anew by each launch: a graph replays it."""
    row = tl.program_id(0).to(tl.int64)
    is_first = tl.program_id(1) == 0
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    temperature = tl.load(temperatures_ptr + row)
    blocks = tl.arange(0, BLOCKS)
    ranks = tl.load(ranks_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=LOWEST_RANK)
    key = (tl.max(ranks) >> 32).to(tl.int32)
    is_off = (top_k >= vocab_size) & (top_p >= 1.0) | (vocab_size == 1)  # so a top_k that is on has tokens to drop
    is_off |= (temperature == 0.0) | (key <= MINUS_INFINITY_KEY) | (key >= INFINITY_KEY)
    if is_first:
        tl.store(num_candidates_ptr + row, tl.where(is_off, -1, 0))
    if is_off:
        return
    top = value_of(key)
    levels_ptr += row * LEVELS
    if top_k <= num_blocks:
        for block in tl.range(tl.program_id(1), num_blocks, tl.num_programs(1), num_stages=1):
            rank, best = best_of(ranks_ptr + row * num_blocks + block, top, temperature)
            if tl.sum((ranks > rank).to(tl.int32)) == top_k - 1:  # of one block: ranks differ
                tl.store(levels_ptr, best)
        return
    # From the mean of the blocks' best, which some hundred tokens reach, to below the middle of normally distributed
    # logits, of which the nucleus of 0.9 ends there or above. Any levels give the same thresholds.
    keys = tl.where(blocks < num_blocks, (ranks >> 32).to(tl.int32), key)
    bests = tl.maximum(tl.div_rn(value_of(keys) - top, temperature), -30.0)
    spread = tl.sum(bests) / num_blocks
    lanes = tl.arange(0, LEVELS)
    levels = tl.where(lanes < LEVELS - 1, spread * (1.0 + lanes * (5.0 / (LEVELS - 1))), -float("inf"))
    if is_first:
        tl.store(levels_ptr + lanes, levels)
    is_counted = top_k < vocab_size
    for block in tl.range(tl.program_id(1), num_blocks, tl.num_programs(1), num_stages=1):
        _, best = best_of(ranks_ptr + row * num_blocks + block, top, temperature)
        sums = tl.zeros((LEVELS,), tl.int64)
        if is_counted | (mass_of(best) > 0):
            tokens = block * BLOCK + tl.arange(0, BLOCK)
            scores = scores_at(logits_ptr + row * stride_logits_row, is_known_ptr, tokens, vocab_size, top, temperature)
            weights = tl.where(is_counted, (scores > -float("inf")).to(tl.int64), mass_of(scores))
            for i in tl.static_range(LEVELS):
                level = tl.max(tl.where(lanes == i, levels, -float("inf")))
                sums = tl.where(lanes == i, tl.sum(tl.where(scores >= level, weights, 0)), sums)
        tl.store(sums_ptr + (row * num_blocks + block) * LEVELS + lanes, sums)


@triton.jit
def _collect_candidates_kernel(
    logits_ptr,  # [N, V], float32 or model dtype
    is_known_ptr,  # [V], bool
    temperatures_ptr,  # [N], float32
    ranks_ptr,  # [N, num_blocks], int64
    top_k_ptr,  # [N], int64
    top_p_ptr,  # [N], float32
    levels_ptr,  # [N, LEVELS], float32
    sums_ptr,  # [N, num_blocks, LEVELS], int64
    candidates_ptr,  # [N, stride_candidates_row], float32, output: the scores that may be the last to stay
    num_candidates_ptr,  # [N], int32, in place: how many there are
    vocab_size,
    stride_logits_row,
    num_blocks,
    stride_candidates_row,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid: (rows, programs of a row)."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(num_candidates_ptr + row) < 0:
        return
    top_k = tl.load(top_k_ptr + row)
    levels_ptr += row * LEVELS
    first, end = tl.load(levels_ptr), tl.full((), float("inf"), tl.float32)
    if top_k > num_blocks:
        sums_ptr += row * num_blocks * LEVELS
        top_p = tl.load(top_p_ptr + row)
        first, end, _ = bracket(levels_ptr, sums_ptr, num_blocks, top_k, vocab_size, top_p, BLOCKS)
    temperature = tl.load(temperatures_ptr + row)
    top = value_of(key_of_best(ranks_ptr + row * num_blocks, num_blocks, BLOCKS))
    for block in tl.range(tl.program_id(1), num_blocks, tl.num_programs(1), num_stages=1):
        _, best = best_of(ranks_ptr + row * num_blocks + block, top, temperature)
        if best >= first:
            tokens = block * BLOCK + tl.arange(0, BLOCK)
            scores = scores_at(logits_ptr + row * stride_logits_row, is_known_ptr, tokens, vocab_size, top, temperature)
            # Without what is out already: a row of few tokens left is searched as one of few candidates.
            chosen = ((scores >= first) & (scores < end) & (scores > -float("inf"))).to(tl.int32)
            start = tl.atomic_add(num_candidates_ptr + row, tl.sum(chosen), sem="relaxed")
            slots = start + tl.cumsum(chosen, 0) - 1
            tl.store(candidates_ptr + row * stride_candidates_row + slots, scores, mask=chosen > 0)


@triton.jit
def _find_thresholds_kernel(
    logits_ptr,  # [N, V], float32 or model dtype
    is_known_ptr,  # [V], bool
    temperatures_ptr,  # [N], float32
    ranks_ptr,  # [N, num_blocks], int64
    top_k_ptr,  # [N], int64
    top_p_ptr,  # [N], float32
    levels_ptr,  # [N, LEVELS], float32
    sums_ptr,  # [N, num_blocks, LEVELS], int64
    candidates_ptr,  # [N, stride_candidates_row], float32
    num_candidates_ptr,  # [N], int32
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
        if top_k < vocab_size:
            lowest_key = threshold(values_ptr, num_candidates, top_k, LOWEST_KEY, 16, False, BLOCK, NUM_STAGES)
        if top_p < 1.0:
            mass = tl.full((), 0, tl.int64)
            start_key, num_digits = tl.full((), LOWEST_KEY, tl.int32), tl.full((), 16, tl.int32)
            if top_k < vocab_size:
                below = tl.maximum(lowest_key, LOWEST_KEY + 1) - 1
                total, _ = tail_sums(values_ptr, num_candidates, below, BLOCK, NUM_STAGES)
                mass = nucleus_mass(total, top_p)
            else:
                levels_ptr += row * LEVELS
                sums_ptr += row * num_blocks * LEVELS
                first, end, mass = bracket(levels_ptr, sums_ptr, num_blocks, top_k, vocab_size, top_p, BLOCKS)
                # As many digits as the number of keys in between has, by the exponent of its float.
                num_keys = (tl.minimum(ordered(end), 1) - ordered(first)).to(tl.float32)
                num_digits = ((num_keys.to(tl.int32, bitcast=True) >> 23) - 126 + 1) // 2
                start_key = tl.where(num_digits < 16, ordered(first), LOWEST_KEY)
            # Not below the k-th: the tokens from there on alone have all of `total`.
            lowest_key = threshold(values_ptr, num_candidates, mass, start_key, num_digits, True, BLOCK, NUM_STAGES)
            above, num_equals = tail_sums(values_ptr, num_candidates, lowest_key, BLOCK, NUM_STAGES)
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
def bracket(levels_ptr, sums_ptr, num_blocks, top_k, vocab_size, top_p, BLOCKS: tl.constexpr):
    """-> the scores from and below which candidates lie, and with top-p alone the mass that these must have."""
    blocks, lanes = tl.arange(0, BLOCKS)[:, None], tl.arange(0, LEVELS)
    levels = tl.load(levels_ptr + lanes)
    sums = tl.sum(tl.load(sums_ptr + blocks * LEVELS + lanes[None, :], mask=blocks < num_blocks, other=0), 0)
    is_counted = top_k < vocab_size
    target = tl.where(is_counted, top_k, nucleus_mass(tl.max(sums), top_p))
    first = tl.max(tl.where(sums >= target, levels, -float("inf")))
    # Of the best k the mass is needed.
    end = tl.min(tl.where((sums < target) & ~is_counted, levels, float("inf")))
    return first, end, target - tl.max(tl.where(sums < target, sums, 0))


@triton.jit
def best_of(rank_ptr, top, temperature):
    """-> the rank of a block's best token, and its score."""
    rank = tl.load(rank_ptr)
    return rank, tl.div_rn(value_of((rank >> 32).to(tl.int32)) - top, temperature)


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
def candidates_at(values_ptr, places, num_values):
    """-> keys of candidates, their masses, and whether there are any at these places, which lie in one block.

    Up to a multiple of 16 they are read whatever is there, so that copies take 16 bytes.
    """
    values = tl.load(values_ptr + places, mask=places < tl.cdiv(num_values, 16) * 16, other=-float("inf"))
    inside = places < num_values
    values = tl.where(inside, values, -float("inf"))
    return ordered(values), mass_of(values), inside


@triton.jit
def tail_sums(values_ptr, num_values, key, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """-> the mass of values above `key`, int64, and the number of those that equal it, int32."""
    lanes = tl.arange(0, BLOCK)
    masses = tl.zeros((BLOCK,), tl.int64)
    num_equals = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, num_values, BLOCK, num_stages=NUM_STAGES):
        keys, weights, inside = candidates_at(values_ptr, start + lanes, num_values)
        masses += tl.where(keys > key, weights, 0)
        num_equals += ((keys == key) & inside).to(tl.int32)
    return tl.sum(masses), tl.sum(num_equals)


@triton.jit
def threshold(
    values_ptr,
    num_values,
    target,
    start_key,
    num_digits,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """-> the largest key from which `target` values lie, or values of that mass; `start_key` if there is none.

    The key is less than 4**num_digits above `start_key`, which is LOWEST_KEY for 16 digits.
    Two bits of the key a round: three sums over the values, of which the first block is read once.
    """
    lanes = tl.arange(0, BLOCK)
    found = tl.full((), 0, tl.int32) + start_key
    first_keys, first_masses, first_inside = candidates_at(values_ptr, lanes, num_values)
    first_weights = first_masses if BY_MASS else first_inside.to(tl.int64)
    for i in range(num_digits):
        step = tl.full((), 1, tl.int32) << (2 * (num_digits - 1 - i))
        # `found + 3 * step` wraps around as it should: from the lowest int32 up to the highest.
        first, second, third = found + step, found + step * 2, found + step * 3
        from_first = tl.where(first_keys >= first, first_weights, 0)
        from_second = tl.where(first_keys >= second, first_weights, 0)
        from_third = tl.where(first_keys >= third, first_weights, 0)
        for start in tl.range(BLOCK, num_values, BLOCK, num_stages=NUM_STAGES):
            keys, masses, inside = candidates_at(values_ptr, start + lanes, num_values)
            weights = masses if BY_MASS else inside.to(tl.int64)
            from_first += tl.where(keys >= first, weights, 0)
            from_second += tl.where(keys >= second, weights, 0)
            from_third += tl.where(keys >= third, weights, 0)
        digit = (tl.sum(from_first) >= target).to(tl.int32)
        digit += (tl.sum(from_second) >= target).to(tl.int32)
        digit += (tl.sum(from_third) >= target).to(tl.int32)
        found += digit * step
    return found


def collect_launch() -> TileLaunch:
    """Of the blocks of which the best are known: 16 tokens a thread."""
    return TileLaunch(1, NARROW_BLOCK, num_warps=4)


def search_launch(vocab_size: int) -> TileLaunch:
    """The candidates of most rows (little more than top_k, or some hundred) fit one block; three more are in flight.

    8 candidates a thread, those of the first block kept, take 215 of the 255 registers that 8 warps leave.
    """
    return TileLaunch(1, min(2048, max(triton.next_power_of_2(vocab_size), 128)), num_warps=8, num_stages=4)
