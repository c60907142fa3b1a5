"""Triton draws of tokens and their noise are those of the specification, to the bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels import cpu, reference
from kernels.operands import Truncation
from kernels.reference.sampling import gumbel_noise
from kernels.triton.gumbel import choose_tokens, noise_bound, token_noise
from tests.support.tensors import assert_close, equal_scores, in_longer_rows, randn

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SEEDS = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 123456789012345, -987654321]
POSITIONS = [0, 1, 4095, 2**31, 2**35]

# (seed, position, token) whose 31 bits are 0, 1, 2**31 - 200, and 2**31 - 64 and 2**31 - 1, where v is clamped. Found
# by inverting the hash: no sample of triples would hit them.
EXTREMES = [(-1, 7, 59670404), (-2, 7, 667547669), (-2, 7, 1622680869), (-1, 7, 1473388014), (-3, 7, 270944677)]
BLOCK = tl.constexpr(1024)


@triton.jit
def noise_kernel(
    seeds_ptr: Any,  # [n], int64
    positions_ptr: Any,  # [n], int64
    tokens_ptr: Any,  # [n], int32
    noise_ptr: Any,  # [n], float32, output
    bounds_ptr: Any,  # [n], float32, output
    n: int,
) -> None:
    """Grid: (blocks of triples,)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    seeds = tl.load(seeds_ptr + places, mask=inside, other=0)
    positions = tl.load(positions_ptr + places, mask=inside, other=0)
    tokens = tl.load(tokens_ptr + places, mask=inside, other=0)
    tl.store(noise_ptr + places, token_noise(seeds, positions, tokens), mask=inside)
    tl.store(bounds_ptr + places, noise_bound(seeds, positions, tokens), mask=inside)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, or a large integer, the rank of a NaN at token 5: what is not written shows."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(torch.nan if out.is_floating_point() else torch.iinfo(out.dtype).max - 5)

    monkeypatch.setattr(torch, "empty", poisoned)


def draw(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, device: torch.device) -> list[int]:
    """By the kernels, with a temperature of 1."""
    is_known = torch.ones(logits.shape[1], dtype=torch.bool, device=device)
    temperatures = torch.ones(logits.shape[0], device=device)
    chosen = choose_tokens(
        in_longer_rows(logits, device), is_known, temperatures, seeds.to(device), positions.to(device)
    )
    assert chosen.dtype == torch.int64
    assert torch.equal(chosen[0], chosen[1])
    return list(chosen[0].tolist())


def by_reference(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> list[int]:
    return list(reference.sampling.gumbel_argmax(logits - logits.amax(1, keepdim=True), seeds, positions).tolist())


def noise_of(triples: list[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    return noise_and_bounds(triples, device)[0]


def noise_and_bounds(triples: list[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    seeds, positions = (torch.tensor([triple[i] for triple in triples]).to(device) for i in (0, 1))
    tokens = torch.tensor([token for _, _, token in triples], dtype=torch.int32).to(device)
    both = torch.full((2, len(triples)), torch.nan, device=device)
    noise_kernel[(triton.cdiv(len(triples), BLOCK.value),)](
        seeds, positions, tokens, *both, len(triples), enable_fp_fusion=False
    )
    return both.cpu()


def test_the_noise_is_that_of_the_specification_to_the_bit(device: torch.device) -> None:
    tokens = [*range(200), 128_255, 151_935, 2**31 - 1]
    triples = [(seed, position, token) for seed in SEEDS for position in POSITIONS for token in tokens]
    assert len(triples) > 9000
    expected = torch.tensor([gumbel_noise(*triple) for triple in triples])
    assert_close(noise_of(triples, device), expected, max_steps=0, rms_steps=0)


def test_the_noise_of_random_triples_has_the_specified_bits(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(8)
    seeds, positions = (torch.randint(-(2**63), 2**63 - 1, (4000,), generator=generator) for _ in range(2))
    tokens = torch.randint(2**31 - 1, (4000,), generator=generator)
    triples = list(zip(seeds.tolist(), positions.tolist(), tokens.tolist(), strict=True))
    expected = torch.tensor([gumbel_noise(*triple) for triple in triples])
    assert_close(noise_of(triples, device), expected, max_steps=0, rms_steps=0)


def test_the_largest_and_the_smallest_noise_have_the_specified_bits(device: torch.device) -> None:
    noise = noise_of(EXTREMES, device)
    expected = torch.tensor([gumbel_noise(*triple) for triple in EXTREMES])
    assert_close(noise, expected, max_steps=0, rms_steps=0)
    assert noise[0] > 22.18
    assert noise[3] == noise[4] < -2.8


def test_the_bound_is_above_all_noise_and_near_what_is_large(device: torch.device) -> None:
    triples = [*EXTREMES, *((seed, 11, token) for seed in (5, -6) for token in range(50_000))]
    noise, bounds = noise_and_bounds(triples, device)
    assert (noise > 8).sum() >= 20
    over = bounds - noise
    assert over.min() > 0
    assert 0.05 < over[noise > 3].max() < 0.09


def test_the_best_score_wins_over_a_higher_bound(device: torch.device) -> None:
    """In some of so many rows the token whose bound is highest is not the best."""
    logits, seeds, positions = randn(150, 64), torch.arange(150), torch.full((150,), 3)
    logits -= logits.amax(1, keepdim=True)
    triples = [(seed, 3, token) for seed in range(150) for token in range(64)]
    highest = (logits + noise_and_bounds(triples, device)[1].view(150, 64)).argmax(1)
    drawn = torch.tensor(draw(logits, seeds, positions, device))
    assert drawn.tolist() == cpu.gumbel.gumbel_argmax(logits, seeds, positions).tolist()
    assert 3 <= int((drawn != highest).sum()) < 50


@pytest.mark.parametrize("first", [0, 2040, 2047])
def test_of_equal_scores_the_first_is_drawn(first: int, device: torch.device) -> None:
    """The second token lies in the same block or the next."""
    logits, seed, position = equal_scores(first)
    assert draw(logits, seed, position, device) == [first]


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 300.0])
@pytest.mark.parametrize("vocab", [1, 37, 700])
def test_draws_are_those_of_the_reference(vocab: int, spread: float, device: torch.device) -> None:
    logits = randn(len(SEEDS), vocab, seed=vocab) * spread
    seeds, positions = torch.tensor(SEEDS), torch.arange(len(SEEDS)) * 3
    assert draw(logits, seeds, positions, device) == by_reference(logits, seeds, positions)


def test_draws_over_several_blocks_are_those_of_the_reference(device: torch.device) -> None:
    # 6101 tokens are three blocks, the last one short: the winners of 12 rows lie in each of them.
    logits = randn(12, 6101, seed=5)
    seeds, positions = torch.arange(12) - 6, torch.arange(12) + 2**33
    drawn = draw(logits, seeds, positions, device)
    assert drawn == by_reference(logits, seeds, positions)
    assert len({token // 2048 for token in drawn}) == 3


def test_a_draw_does_not_depend_on_the_rest_of_the_batch(device: torch.device) -> None:
    logits, seeds, positions = randn(7, 300, seed=1), torch.arange(7) * 17, torch.arange(7) + 100
    together = draw(logits, seeds, positions, device)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(2))
    assert draw(logits[order], seeds[order], positions[order], device) == [together[i] for i in order.tolist()]
    assert draw(logits[3:4], seeds[3:4], positions[3:4], device) == together[3:4]


def test_a_masked_token_is_never_drawn(device: torch.device) -> None:
    logits = torch.zeros(40, 50)
    logits[:, torch.arange(50) % 5 != 2] = -torch.inf
    drawn = draw(logits, torch.full((40,), 9), torch.arange(40), device)
    assert set(drawn) <= set(range(2, 50, 5))
    assert len(set(drawn)) > 5


def test_strided_parameters_and_columns_are_read_as_they_are(device: torch.device) -> None:
    logits = randn(90, 6, seed=3)
    seeds, positions = torch.arange(12) - 4, torch.arange(12) * 5
    expected = by_reference(logits.T, seeds[::2], positions[::2])
    is_known = torch.ones(90, dtype=torch.bool, device=device)
    temperatures = torch.tensor([1.0, 7.0] * 6, device=device)
    draws = (temperatures[::2], seeds.to(device)[::2], positions.to(device)[::2])
    assert choose_tokens(logits.to(device).T, is_known, *draws).tolist() == [expected, expected]
    limits = truncation_of([3, 9] * 6, [0.9, 0.1] * 6, [0.0, 0.9] * 6)
    strided = Truncation(*(limit.to(device)[::2] for limit in limits))
    whole = (logits.T, (torch.ones(6), seeds[::2], positions[::2]), range(0), device)
    assert choose_tokens(logits.to(device).T, is_known, *draws, strided)[1].tolist() == chosen_of(
        *whole, Truncation(*(limit[::2].contiguous() for limit in limits))
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a vocabulary of 64 rows is for a GPU")
def test_draws_over_a_real_vocabulary_are_those_of_the_cpu(device: torch.device) -> None:
    logits = randn(64, 151_936, seed=6) * 3
    seeds, positions = torch.arange(64) - 32, torch.arange(64) * 1001
    expected = cpu.gumbel.gumbel_argmax(logits - logits.amax(1, keepdim=True), seeds, positions)
    assert draw(logits, seeds, positions, device) == expected.tolist()


Draws = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def chosen_of(
    logits: torch.Tensor, draws: Draws, unknown: range, device: torch.device, truncation: Truncation | None = None
) -> Any:
    """Both lines of what is chosen by the kernels, which must leave the logits as they are."""
    is_known = torch.ones(logits.shape[1], dtype=torch.bool)
    is_known[list(unknown)] = False
    given = in_longer_rows(logits, device)
    temperatures, seeds, positions = (tensor.to(device) for tensor in draws)
    limits = None if truncation is None else Truncation(*(tensor.to(device) for tensor in truncation))
    chosen = choose_tokens(given, is_known.to(device), temperatures, seeds, positions, limits)
    assert_close(given.cpu(), logits, max_steps=0, rms_steps=0)
    expected = reference.choose_tokens(logits, is_known, *draws, truncation)
    assert chosen.cpu().tolist() == expected.tolist()
    return expected[1].tolist()


def plain_draws(temperatures: list[float]) -> Draws:
    count = len(temperatures)
    seeds, positions = (torch.tensor((values * 9)[:count]) for values in (SEEDS, POSITIONS))
    return torch.tensor(temperatures), seeds, positions


@pytest.mark.parametrize("vocab", [1, 3, 700, 2048, 5003])
def test_tokens_are_chosen_as_by_the_reference(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = (randn(7, vocab, seed=vocab) * 3).to(dtype)
    chosen = chosen_of(logits, plain_draws([0.0, 1.0, 0.01, 2.0, 0.0, 0.7, 1.3]), range(0), device)
    assert all(0 <= token < vocab for token in chosen)


def test_bfloat16_logits_are_read_as_they_are(device: torch.device) -> None:
    logits = (randn(6, 2500) * 4).bfloat16()  # with ties
    chosen_of(logits, plain_draws([0.0, 0.9, 0.4, 0.0, 1.0, 1e-3]), range(0), device)


def test_tokens_are_those_of_the_draw_of_edited_logits_to_the_bit(device: torch.device) -> None:
    logits = randn(5, 4099, seed=3) * 5
    temperatures, seeds, positions = plain_draws([0.3, 1.0, 0.77, 1.9, 0.05])
    edited = logits.clone()
    edited[:, 4000:] = -torch.inf
    edited -= edited.amax(-1, keepdim=True)
    edited /= temperatures.unsqueeze(1)
    expected = draw(edited, seeds, positions, device)
    assert chosen_of(logits, (temperatures, seeds, positions), range(4000, 4099), device) == expected


def test_the_maximum_is_taken_off_before_noise_is_added(device: torch.device) -> None:
    """Logits near 2^23 are whole numbers: noise that were added to them as they are would be rounded to one."""
    logits = randn(24, 300, seed=2).round() + 2.0**23
    temperatures, seeds, positions = plain_draws([0.5, 0.9, 1.3, 2.0] * 6)
    chosen = chosen_of(logits, (temperatures, seeds, positions), range(0), device)
    as_they_are = reference.sampling.gumbel_argmax(logits / temperatures[:, None], seeds, positions).tolist()
    assert sum(token != other for token, other in zip(chosen, as_they_are, strict=True)) >= 5


def test_tokens_that_mean_nothing_are_never_chosen(device: torch.device) -> None:
    logits = randn(4, 2100)
    logits[:, 2050:] = 90.0
    logits[1, 7] = 80.0
    logits[2, :2050] = -torch.inf  # what may be chosen is nothing
    chosen = chosen_of(logits, plain_draws([0.0, 0.0, 1.0, 0.5]), range(2050, 2100), device)
    assert chosen[1:3] == [7, -1]
    assert max(chosen) < 2050


def test_the_best_token_is_sought_in_all_blocks(device: torch.device) -> None:
    """Also where the first block has none."""
    logits = randn(4, 2100, seed=2)
    logits[2:, :2048] = -torch.inf
    chosen = chosen_of(logits, plain_draws([0.5, 0.0, 0.9, 1.1]), range(0), device)
    assert min(chosen[2:]) >= 2048


def test_logits_are_divided_by_the_temperature_and_rounded_once(device: torch.device) -> None:
    """Found by a search: a product with 1 / temperature is off by one unit in the last place, and decides otherwise."""
    seeds = torch.tensor([16, 21, 27, 29, 32, 43])
    temperatures = torch.tensor([0.9, 0.3, 1.3, 1.3, 1.3, 0.7])
    below = ("0x1.e01654p-2", "0x1.8ac3e2p-5", "0x1.315730p+0", "0x1.0f2816p+1", "0x1.055548p+2", "0x1.ce6244p-2")
    logits = torch.tensor([[0.0, -float.fromhex(text)] for text in below])
    draws = (temperatures, seeds, torch.zeros(6, dtype=torch.int64))
    assert chosen_of(logits, draws, range(0), device) == [1, 1, 0, 0, 0, 1]


def test_a_token_far_below_may_win_over_the_best_of_another_block(device: torch.device) -> None:
    """Seed, position and tokens were searched for: token 2460 draws 22.18, the most there is, and token 2 -1.83."""
    logits = torch.full((3, 2500), -60.0)
    logits[:, 2], logits[:, 2460] = 0.0, torch.tensor([-23.9, -11.95, -24.1])
    draws = (torch.tensor([1.0, 0.5, 1.0]), torch.full((3,), 16_141_018), torch.full((3,), 7))
    assert chosen_of(logits, draws, range(0), device) == [2460, 2460, 2]


def test_of_equal_logits_the_first_known_is_chosen(device: torch.device) -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [3, 9, 30, 2500]] = 1.0
    logits[0, [100, 101]] = -0.0
    assert chosen_of(logits, plain_draws([0.0]), range(4), device) == [9]


def truncation_of(top_k: list[int], top_p: list[float], min_p: list[float]) -> Truncation:
    return Truncation(torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))


@pytest.mark.parametrize("vocab", [1, 7, 700, 2503])
def test_truncated_rows_draw_as_in_the_reference(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Also beside greedy rows, whose limits mean nothing, and rows without any."""
    logits = (randn(9, vocab, seed=vocab) * 3).to(dtype)
    logits[5:7] = logits[5:7].round()
    draws = plain_draws([0.7, 1.0, 0.0, 2.0, 0.6, 1.0, 1.0, 1.3, 0.9])
    top_k = [min(k, vocab) for k in (3, vocab, 2, vocab, 20, 5, vocab, 40, vocab)]
    limits = truncation_of(
        top_k, [1.0, 0.9, 0.5, 1.0, 0.95, 1.0, 0.5, 0.8, 1.0], [0.0] * 3 + [0.2] + [0.0] * 3 + [0.05, 0.0]
    )
    for unknown in (range(0), range(1, vocab, 3)):
        kept = chosen_of(logits, draws, unknown, device, limits)
        assert not set(kept) & set(unknown)
    assert vocab < 700 or chosen_of(logits, draws, range(0), device) != kept


def test_a_token_that_is_not_among_the_best_is_not_drawn(device: torch.device) -> None:
    logits = randn(1, 60).expand(40, 60)
    draws = (torch.full((40,), 50.0), torch.arange(40), torch.zeros(40, dtype=torch.int64))
    limits = truncation_of([3] * 40, [1.0] * 40, [0.0] * 40)
    assert set(chosen_of(logits, draws, range(0), device, limits)) == set(logits[0].topk(3).indices.tolist())


def test_of_equal_tokens_at_the_nucleus_edge_the_lower_ones_are_drawn(device: torch.device) -> None:
    """Those that stay lie in one block, or on both sides of an edge of blocks."""
    one_block, two_blocks = torch.zeros(50, 300), torch.full((50, 2500), -60.0)
    two_blocks[:, 2042:2058] = 0.0
    for logits, top_p, first, end in ((one_block, 0.0217, 0, 7), (two_blocks, 0.53, 2042, 2051)):
        count = logits.shape[0]
        draws = (torch.ones(count), torch.arange(count), torch.zeros(count, dtype=torch.int64))
        limits = truncation_of([logits.shape[1]] * count, [top_p] * count, [0.0] * count)
        assert set(chosen_of(logits, draws, range(0), device, limits)) == set(range(first, end))


@pytest.mark.parametrize("limits", [None, truncation_of([5] * 7, [0.9] * 7, [0.1] * 7)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_are_not_finite_choose_nothing(
    temperature: float, limits: Truncation | None, device: torch.device
) -> None:
    logits = randn(7, 2100)
    logits[0, 2090] = torch.nan  # not known, and yet the row is unsound
    logits[1, 5] = torch.nan
    logits[2, 2099] = torch.inf
    logits[3, 2047] = torch.inf
    logits[4] = -torch.inf
    logits[5, 1:] = -torch.inf
    chosen = chosen_of(logits, plain_draws([temperature] * 7), range(2080, 2100), device, limits)
    assert chosen[:6] == [-1, -1, -1, -1, -1, 0]
    assert chosen[6] >= 0


def test_no_rows_choose_nothing(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    is_known = torch.ones(5, dtype=torch.bool, device=device)
    assert choose_tokens(none.float().view(0, 5), is_known, none.float(), none, none).shape == (2, 0)
