"""Masks, penalties and draws of tokens on a CPU agree with the reference and with transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels import cpu, reference
from kernels.cpu import gumbel
from kernels.gumbel_noise import MAX_NOISE
from kernels.interface import Operations
from kernels.native.operations import native_operations
from kernels.operands import Truncation
from kernels.reference.sampling import gumbel_noise
from tests.support.tensors import assert_close, native_variants, truncated_natively

PINNED = ["0x1.a95f1a0000000p+1", "-0x1.8088fa0000000p-2", "0x1.25cb660000000p+2"]
Argmax = Callable[[torch.Tensor], torch.Tensor]
Choice = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], list[int]]
Draws = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SEEDS = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 123456789012345]


def random_logits(rows: int, vocab: int, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def warped(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """What transformers leaves of one row."""
    scores, no_ids = row[None].clone(), torch.empty(1, 0, dtype=torch.int64)
    if top_k < row.shape[0]:
        scores = TopKLogitsWarper(top_k)(no_ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(no_ids, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(no_ids, scores)
    return scores[0]


def check_masks(
    logits: torch.Tensor, options: list[tuple[int, float, float]], variants: Sequence[str] = native_variants()
) -> None:
    """All implementations must leave exactly the logits that transformers leaves, and the same tokens.

    Among equal logits transformers leaves arbitrary ones (its sort is not stable), so tokens are compared with the
    reference. options: (top_k, top_p, min_p) of each row; variants: the native kernels, whose mass is a sum in double:
    they may decide otherwise where an edge is within the roundings of a sum in float32.
    """
    top_k = torch.tensor([k for k, _, _ in options])
    top_p, min_p = (torch.tensor([option[i] for option in options], dtype=torch.float32) for i in (1, 2))
    expected = torch.stack(
        [warped(*row) for row in zip(logits, top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)]
    )
    from_cpu, from_reference = logits.clone(), logits.clone()
    cpu.sampling.mask_top_k_top_p_min_p(from_cpu, top_k, top_p, min_p)
    reference.sampling.mask_top_k_top_p_min_p(from_reference, top_k, top_p, min_p)
    assert_close(from_cpu, from_reference, max_steps=0, rms_steps=0)
    for variant in variants:
        native = truncated_natively(variant, logits, Truncation(top_k, top_p, min_p))
        assert_close(native, from_reference, max_steps=0, rms_steps=0)
    for row, other in zip(from_cpu, expected, strict=True):
        assert_close(row.sort().values, other.sort().values, max_steps=0, rms_steps=0)
        if len(set(logits.flatten().tolist())) == logits.numel():
            assert_close(row, other, max_steps=0, rms_steps=0)


@pytest.mark.parametrize("vocab", [1, 2, 1000, 3001])
def test_masks_equal_those_of_transformers(vocab: int) -> None:
    options = [
        (vocab, 1.0, 0.0),
        (1, 1.0, 0.0),
        (50, 1.0, 0.0),
        (vocab, 0.9, 0.0),
        (vocab, 0.05, 0.0),
        (vocab, 0.0, 0.0),
        (vocab, 0.999, 0.0),
        (vocab, 1.0, 0.1),
        (vocab, 1.0, 1.0),
        (50, 0.9, 0.05),
        (7, 0.5, 0.0),
        (2000, 0.99, 0.01),
    ]
    options = [(min(k, vocab), p, least) for k, p, least in options]
    check_masks(random_logits(len(options), vocab), options)


@pytest.mark.parametrize("spread", [0.01, *(pytest.param(spread, marks=pytest.mark.slow) for spread in (1.0, 4.0))])
def test_masks_equal_those_of_transformers_on_a_large_vocabulary(spread: float) -> None:
    # spread 0.01: the nucleus is most of the vocabulary; 4.0: some hundred tokens.
    vocab = 40_001
    options = [(vocab, 0.95, 0.0), (vocab, 0.5, 0.02), (1024, 0.9, 0.0), (1025, 0.999, 0.0), (5000, 0.9999, 0.0)]
    check_masks(random_logits(5, vocab, spread=spread), options)


def test_ties_leave_as_many_tokens_as_in_transformers() -> None:
    # Few distinct values: ties at the k-th token and across the edge of the nucleus.
    logits = random_logits(6, 2500).round()
    options = [(10, 1.0, 0.0), (2500, 0.6, 0.0), (2500, 0.02, 0.0), (30, 0.5, 0.0), (40, 0.9, 0.3), (2500, 0.97, 0.0)]
    check_masks(logits, options)
    check_masks(torch.zeros(3, 2500), [(10, 0.5, 0.5), (2500, 0.5, 0.0), (2500, 0.3, 1.0)])


@pytest.mark.parametrize("sampling", [cpu.sampling, reference.sampling])
def test_of_equal_tokens_at_the_edge_of_the_nucleus_the_lower_ones_stay(sampling: ModuleType) -> None:
    logits = torch.zeros(2, 20)
    logits[1, 15] = 1.0
    sampling.mask_top_k_top_p_min_p(logits, torch.tensor([20, 20]), torch.tensor([0.22, 0.3]), torch.zeros(2))
    kept = [(row > -torch.inf).nonzero().flatten().tolist() for row in logits]
    assert kept == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 15]]


def test_tokens_that_are_already_out_stay_out() -> None:
    logits = random_logits(4, 2000)
    logits[:, ::2] = -torch.inf
    logits[3, 5:] = -torch.inf
    check_masks(logits, [(40, 0.9, 0.0), (2000, 0.9, 0.0), (2000, 1.0, 0.2), (10, 0.99, 0.0)])


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.integers(1, 300),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 0.1, 1.0, 5.0, 40.0]),
    rounded=st.booleans(),
    option=st.tuples(st.integers(1, 300), st.floats(0, 1, width=32), st.floats(0, 1, width=32)),
)
def test_masks_equal_those_of_transformers_for_any_parameters(
    vocab: int, seed: int, spread: float, rounded: bool, option: tuple[int, float, float]
) -> None:
    logits = random_logits(1, vocab, spread=spread, seed=seed)
    logits = logits.round() if rounded else logits
    check_masks(logits, [(min(option[0], vocab), option[1], option[2])], variants=())


def test_a_nucleus_edge_within_rounding_is_decided_as_by_transformers() -> None:
    # 64 equal shares: the threshold of p = j/64 falls exactly on a cumulative mass.
    logits = torch.zeros(63, 64)
    logits += torch.linspace(0, 1e-6, 64)
    check_masks(logits, [(64, j / 64, 0.0) for j in range(1, 64)])


@pytest.mark.parametrize("top_k", [50, 3000])
def test_a_nucleus_edge_at_a_tokens_mass_is_decided_as_by_transformers(top_k: int) -> None:
    logits = random_logits(1, 3000, spread=2.0)
    mass = TopKLogitsWarper(top_k)(None, logits)[0].sort().values.softmax(-1).cumsum(-1)[-50:-1:3]
    options = [(top_k, 1 - float(value), 0.0) for value in mass]
    check_masks(logits.expand(len(options), -1).contiguous(), options, variants=())


def test_rows_with_everything_off_are_not_touched() -> None:
    logits = random_logits(3, 500)
    logits[1, 3] = torch.nan
    masked = logits.clone()
    cpu.sampling.mask_top_k_top_p_min_p(masked, torch.tensor([500, 500, 20]), torch.ones(3), torch.zeros(3))
    assert torch.equal(masked[0], logits[0])
    assert_close(masked[1], logits[1], max_steps=0, rms_steps=0)
    assert (masked[2] > -torch.inf).sum() == 20


def test_more_rows_than_a_slab_are_all_masked() -> None:
    options = [(300, 1.0, 0.0) if row % 3 else (1 + row, 0.8, 0.0) for row in range(21)]
    check_masks(random_logits(21, 300), options)


@pytest.mark.parametrize("operations", [cpu, reference])
def test_the_repetition_penalty_is_that_of_transformers(operations: Operations) -> None:
    logits = random_logits(3, 77)
    ids = torch.randint(77, (3, 20), generator=torch.Generator().manual_seed(1))
    rows, tokens = torch.zeros(3, 77).scatter_(1, ids, 1.0).nonzero(as_tuple=True)
    in_output = (tokens < 40).int()
    penalties = torch.tensor([1.0, 1.3, 0.7])
    expected = torch.cat(
        [RepetitionPenaltyLogitsProcessor(float(penalties[i]))(ids[i : i + 1], logits[i : i + 1]) for i in range(3)]
    )
    operations.apply_penalties(logits, rows, tokens, in_output, penalties, torch.zeros(3), torch.zeros(3))
    assert_close(logits, expected, max_steps=0, rms_steps=0)


def test_penalties_agree_with_the_reference() -> None:
    generator = torch.Generator().manual_seed(2)
    rows, tokens = (torch.rand(5, 333, generator=generator) < 0.4).nonzero(as_tuple=True)
    counts = torch.randint(-4, 4, rows.shape, generator=generator).clamp(min=0).int()
    repetition = torch.tensor([1.0, 1.2, 0.5, 1.0, 1.1])
    presence = torch.tensor([0.0, 0.5, -1.0, 2.0, 0.0])
    frequency = torch.tensor([0.0, 0.25, 0.0, -0.5, 2.0])
    actual = random_logits(5, 333)
    actual[:, 5] = -torch.inf
    expected, before = actual.clone(), actual.clone()
    cpu.apply_penalties(actual, rows, tokens, counts, repetition, presence, frequency)
    reference.apply_penalties(expected, rows, tokens, counts, repetition, presence, frequency)
    assert_close(actual, expected, max_steps=0, rms_steps=0)
    assert torch.equal(actual[0], before[0])


@pytest.mark.parametrize("operations", [cpu, reference])
def test_presence_and_frequency_count_the_output_only(operations: Operations) -> None:
    logits = torch.ones(1, 4)
    rows, tokens, counts = torch.tensor([0, 0, 0]), torch.tensor([2, 0, 1]), torch.tensor([3, 0, 1]).int()
    penalties = (torch.ones(1), torch.tensor([0.5]), torch.tensor([0.25]))
    operations.apply_penalties(logits, rows, tokens, counts, *penalties)
    assert logits.tolist() == [[1.0, 0.25, -0.25, 1.0]]


@pytest.mark.parametrize("argmax", [cpu.sampling.argmax, reference.sampling.argmax])
@pytest.mark.parametrize("vocab_size", [1003, 4096, 5003])  # read whole, in blocks, in blocks of which one is short
def test_argmax_takes_the_lower_of_equals_and_sees_nan(argmax: Argmax, vocab_size: int) -> None:
    logits = random_logits(9, vocab_size)
    last = vocab_size - 1
    logits[0, [700, 41, 900]] = 50.0
    logits[1] = -torch.inf
    logits[2] = 0.0
    logits[3, [17, 20, last]] = torch.nan
    logits[4, last] = 50.0
    logits[5, [last, last - 3]] = torch.nan
    logits[6, [last, last - 200]] = torch.inf
    assert argmax(logits).tolist()[:7] == [41, 0, 0, 17, last, last - 3, last - 200]
    assert argmax(logits).tolist() == logits.argmax(-1).tolist()


def draw(draws: Draws, logits: torch.Tensor, seed: int, first_position: int = 0) -> torch.Tensor:
    rows = logits.shape[0]
    return draws(logits, torch.full((rows,), seed), torch.arange(rows) + first_position)


def test_the_noise_is_pinned() -> None:
    # A change here changes every seeded result ever written: it may only come with a new version of the specification.
    pinned = [gumbel_noise(*place) for place in ((0, 0, 0), (1, 2, 3), (-7, 2**40, 151_935))]
    assert [value.hex() for value in pinned] == PINNED


@pytest.mark.parametrize("seed", SEEDS)
def test_the_noise_of_both_implementations_is_the_same_to_the_bit(seed: int) -> None:
    tokens = torch.cat((torch.arange(300), torch.tensor([151_935, 2**31 - 1])))
    for position in (0, 1, 4095, 2**35):
        expected = [gumbel_noise(seed, position, token) for token in tokens.tolist()]
        assert gumbel.gumbel_noise(seed, position, tokens).tolist() == expected


def test_the_noise_of_a_token_does_not_depend_on_how_many_are_asked_for() -> None:
    whole = gumbel.gumbel_noise(5, 6, torch.arange(1000))
    for start, end in ((0, 1), (3, 10), (17, 999), (990, 1000)):
        assert torch.equal(gumbel.gumbel_noise(5, 6, torch.arange(start, end)), whole[start:end])


def test_the_logarithm_is_accurate() -> None:
    x = torch.cat((torch.logspace(-9.6, 1.2, 20_000), torch.linspace(0.5, 2, 20_000)))
    mantissa, exponent = gumbel._split(x)
    error = (gumbel._log_series(mantissa - 1, exponent).double() - x.double().log()).abs()
    assert float((error / x.double().log().abs().clamp(min=0.5)).max()) < 2e-7


@pytest.mark.parametrize("direction", ["tokens", "positions", "seeds"])
def test_the_noise_follows_a_gumbel_distribution(direction: str) -> None:
    n = 20_000
    index, zeros = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    seeds = index if direction == "seeds" else zeros + 99
    positions = index if direction == "positions" else zeros + 7
    tokens = index if direction == "tokens" else zeros + 42
    noise = gumbel._noise(gumbel._row_keys(seeds, positions), tokens).double()
    uniform = torch.exp(-torch.exp(-noise))
    # Kolmogorov-Smirnov: above 1.95 / sqrt(n) in one run of 1000. The seeds are fixed, so this is no gamble.
    distance = (uniform.sort().values - (torch.arange(n) + 0.5) / n).abs().max()
    assert float(distance) < 1.95 / math.sqrt(n)
    for lag in (1, 2, 7, 64):
        correlation = torch.corrcoef(torch.stack((uniform[:-lag], uniform[lag:])))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(n)


def test_the_largest_noise_is_within_the_bound_that_prunes() -> None:
    v = torch.tensor([2.0**-32])
    exponential = -gumbel._log_series(-v, torch.zeros(1))
    mantissa, exponent = gumbel._split(exponential)
    largest = -float(gumbel._log_series(mantissa - 1, exponent))
    assert MAX_NOISE - 0.02 < largest < MAX_NOISE


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 300.0])
@pytest.mark.parametrize("vocab", [1, 37, 1000])
def test_both_implementations_draw_the_same_tokens(vocab: int, spread: float) -> None:
    num_rows = 19 if vocab < 1000 else 5  # the reference goes through the tokens one by one
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    for seed in SEEDS[:3]:
        expected = draw(reference.sampling.gumbel_argmax, logits, seed)
        assert draw(gumbel.gumbel_argmax, logits, seed).tolist() == expected.tolist()


@pytest.mark.slow
def test_draws_follow_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.02, 0.005])
    n = 5_000
    drawn = draw(gumbel.gumbel_argmax, probabilities.log().expand(n, 6).contiguous(), seed=3)
    observed = torch.bincount(drawn, minlength=6).double()
    chi_square = float(((observed - n * probabilities).square() / (n * probabilities)).sum())
    assert chi_square < 20.5  # 5 degrees of freedom, one run in 1000


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = torch.randn(23, 500, generator=torch.Generator().manual_seed(1))
    seeds, positions = torch.arange(23) * 17, torch.arange(23) + 100
    together = gumbel.gumbel_argmax(logits, seeds, positions)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(2))
    assert torch.equal(gumbel.gumbel_argmax(logits[order], seeds[order], positions[order]), together[order])
    for row in range(23):
        one = slice(row, row + 1)
        assert gumbel.gumbel_argmax(logits[one], seeds[one], positions[one]).tolist() == [int(together[row])]


@pytest.mark.parametrize("draws", [gumbel.gumbel_argmax, reference.sampling.gumbel_argmax])
def test_a_masked_token_is_never_drawn(draws: Draws) -> None:
    logits = torch.zeros(200, 50)
    logits[:, torch.arange(50) % 5 != 2] = -torch.inf
    assert set(draw(draws, logits, seed=9).tolist()) <= set(range(2, 50, 5))
    assert len(set(draw(draws, logits, seed=9).tolist())) > 5


def test_rows_that_are_not_finite_are_decided_as_in_the_reference() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(4))
    logits[0] = -torch.inf
    logits[1, [30, 12]] = torch.inf
    logits[2, [9, 3]] = torch.nan
    logits[3, 1:] = -torch.inf
    drawn = draw(gumbel.gumbel_argmax, logits, seed=1).tolist()
    assert drawn == draw(reference.sampling.gumbel_argmax, logits, seed=1).tolist()
    assert drawn[:4] == [0, 12, 3, 0]


def test_no_rows_draw_nothing() -> None:
    assert draw(gumbel.gumbel_argmax, torch.empty(0, 7), seed=1).shape == (0,)


@pytest.fixture(scope="module", params=[1, 97, 5003])
def choices(request: pytest.FixtureRequest) -> list[Choice]:
    """Logits, how to choose of them, and what the reference chooses; it goes through the tokens one by one."""
    vocab, num_rows = request.param, 9
    logits = random_logits(num_rows, vocab, seed=vocab)
    logits[0, vocab // 2] = torch.nan
    logits[1, -1] = torch.inf
    logits[2] = -torch.inf
    logits[3:5] = logits[3:5].round()  # ties, of known and unknown tokens too
    is_known = torch.rand(vocab, generator=torch.Generator().manual_seed(1)) < 0.8
    is_known[0] = True
    seeds, positions = torch.tensor((SEEDS * 2)[:num_rows]), torch.arange(num_rows)
    found: list[Choice] = []
    for temperatures in (torch.zeros(num_rows), torch.arange(num_rows) % 3 * 0.7, torch.full((num_rows,), 0.9)):
        for known in (is_known, torch.ones(vocab, dtype=torch.bool)):
            draws = (known, temperatures, seeds, positions)
            for rows in (logits, logits.bfloat16()):
                found.append((rows, draws, reference.choose_tokens(rows, *draws)[1].tolist()))
    return found


@pytest.mark.parametrize("variant", [None, *native_variants()])
def test_tokens_are_chosen_as_by_the_reference(variant: str | None, choices: list[Choice]) -> None:
    ops: Operations = cpu if variant is None else native_operations(variant)
    for logits, draws, expected in choices:
        given = logits.clone()
        best, chosen = ops.choose_tokens(given, *draws)
        assert draws[1].any() or torch.equal(given.nan_to_num(7.0), logits.nan_to_num(7.0))  # as they were
        assert chosen.tolist() == expected
        assert ((best >= 0) & (best < logits.shape[1])).all()
        assert expected[:3] == [-1] * 3
