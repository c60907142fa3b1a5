from __future__ import annotations

import math

import pytest
import torch

from kernels import cpu, gumbel_noise, reference
from kernels.cpu import gumbel as cpu_gumbel
from kernels.interface import Operations
from kernels.reference import sampling as reference_gumbel

PINNED = ["0x1.a95f1a0000000p+1", "-0x1.8088fa0000000p-2", "0x1.25cb660000000p+2"]
SEEDS = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 123456789012345]


def draw(operations: Operations, logits: torch.Tensor, seed: int, first_position: int = 0) -> torch.Tensor:
    rows = logits.shape[0]
    return operations.gumbel_argmax(logits, torch.full((rows,), seed), torch.arange(rows) + first_position)


def test_the_noise_is_pinned() -> None:
    # A change here changes every seeded result ever written: it may only come with a new version of the specification.
    pinned = [reference_gumbel.gumbel_noise(*place) for place in ((0, 0, 0), (1, 2, 3), (-7, 2**40, 151_935))]
    assert [value.hex() for value in pinned] == PINNED


@pytest.mark.parametrize("seed", SEEDS)
def test_the_noise_of_both_implementations_is_the_same_to_the_bit(seed: int) -> None:
    tokens = torch.cat((torch.arange(300), torch.tensor([151_935, 2**31 - 1])))
    for position in (0, 1, 4095, 2**35):
        expected = [reference_gumbel.gumbel_noise(seed, position, token) for token in tokens.tolist()]
        assert cpu_gumbel.gumbel_noise(seed, position, tokens).tolist() == expected


def test_the_noise_of_a_token_does_not_depend_on_how_many_are_asked_for() -> None:
    whole = cpu_gumbel.gumbel_noise(5, 6, torch.arange(1000))
    for start, end in ((0, 1), (3, 10), (17, 999), (990, 1000)):
        assert torch.equal(cpu_gumbel.gumbel_noise(5, 6, torch.arange(start, end)), whole[start:end])


def test_the_logarithm_is_accurate() -> None:
    x = torch.cat((torch.logspace(-9.6, 1.2, 20_000), torch.linspace(0.5, 2, 20_000)))
    mantissa, exponent = cpu_gumbel._split(x)
    error = (cpu_gumbel._log_series(mantissa - 1, exponent).double() - x.double().log()).abs()
    assert float((error / x.double().log().abs().clamp(min=0.5)).max()) < 2e-7


@pytest.mark.parametrize("direction", ["tokens", "positions", "seeds"])
def test_the_noise_follows_a_gumbel_distribution(direction: str) -> None:
    n = 20_000
    index, zeros = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    seeds = index if direction == "seeds" else zeros + 99
    positions = index if direction == "positions" else zeros + 7
    tokens = index if direction == "tokens" else zeros + 42
    noise = cpu_gumbel._noise(cpu_gumbel._row_keys(seeds, positions), tokens).double()
    uniform = torch.exp(-torch.exp(-noise))
    # Kolmogorov-Smirnov: above 1.95 / sqrt(n) in one run of 1000. The seeds are fixed, so this is no gamble.
    distance = (uniform.sort().values - (torch.arange(n) + 0.5) / n).abs().max()
    assert float(distance) < 1.95 / math.sqrt(n)
    for lag in (1, 2, 7, 64):
        correlation = torch.corrcoef(torch.stack((uniform[:-lag], uniform[lag:])))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(n)


def test_the_largest_noise_is_within_the_bound_that_prunes() -> None:
    v = torch.tensor([2.0**-32])
    exponential = -cpu_gumbel._log_series(-v, torch.zeros(1))
    mantissa, exponent = cpu_gumbel._split(exponential)
    largest = -float(cpu_gumbel._log_series(mantissa - 1, exponent))
    assert gumbel_noise.MAX_NOISE - 0.02 < largest < gumbel_noise.MAX_NOISE


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 300.0])
@pytest.mark.parametrize("vocab", [1, 37, 1000])
def test_both_implementations_draw_the_same_tokens(vocab: int, spread: float) -> None:
    num_rows = 19 if vocab < 1000 else 5  # the reference goes through the tokens one by one
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    for seed in SEEDS[:3]:
        assert draw(cpu, logits, seed).tolist() == draw(reference, logits, seed).tolist()


@pytest.mark.slow
def test_draws_follow_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.02, 0.005])
    n = 5_000
    drawn = draw(cpu, probabilities.log().expand(n, 6).contiguous(), seed=3)
    observed = torch.bincount(drawn, minlength=6).double()
    chi_square = float(((observed - n * probabilities).square() / (n * probabilities)).sum())
    assert chi_square < 20.5  # 5 degrees of freedom, one run in 1000


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = torch.randn(23, 500, generator=torch.Generator().manual_seed(1))
    seeds, positions = torch.arange(23) * 17, torch.arange(23) + 100
    together = cpu.gumbel_argmax(logits, seeds, positions)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(2))
    assert torch.equal(cpu.gumbel_argmax(logits[order], seeds[order], positions[order]), together[order])
    for row in range(23):
        one = slice(row, row + 1)
        assert cpu.gumbel_argmax(logits[one], seeds[one], positions[one]).tolist() == [int(together[row])]


@pytest.mark.parametrize("operations", [cpu, reference])
def test_a_masked_token_is_never_drawn(operations: Operations) -> None:
    logits = torch.zeros(200, 50)
    logits[:, torch.arange(50) % 5 != 2] = -torch.inf
    assert set(draw(operations, logits, seed=9).tolist()) <= set(range(2, 50, 5))
    assert len(set(draw(operations, logits, seed=9).tolist())) > 5


def test_rows_that_are_not_finite_are_decided_as_in_the_reference() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(4))
    logits[0] = -torch.inf
    logits[1, [30, 12]] = torch.inf
    logits[2, [9, 3]] = torch.nan
    logits[3, 1:] = -torch.inf
    drawn = draw(cpu, logits, seed=1).tolist()
    assert drawn == draw(reference, logits, seed=1).tolist()
    assert drawn[:4] == [0, 12, 3, 0]


def test_no_rows_draw_nothing() -> None:
    assert draw(cpu, torch.empty(0, 7), seed=1).shape == (0,)
