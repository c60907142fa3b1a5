"""Triton masks and penalties of logits are those of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton

from kernels import cpu, reference
from kernels.operands import Truncation
from kernels.triton import gumbel, truncation
from kernels.triton.gumbel import _rank_kernel
from kernels.triton.launch import TileLaunch
from kernels.triton.sampling import apply_penalties
from kernels.triton.truncation import MAX_VOCAB_SIZE, find_thresholds
from tests.support.tensors import assert_close, in_longer_rows

Option = tuple[int, float, float]  # top_k, top_p, min_p
NARROW = 16
# The interpreter computes in NumPy, which warns of inf - inf where a GPU does not.
allows_nan = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, or a large integer that ranks above every token: what is not written shows."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(torch.nan if out.is_floating_point() else torch.iinfo(out.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def narrow_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few hundred tokens take several blocks, and their candidates, too."""
    for module, launch in ((gumbel, "choose_launch"), (truncation, "collect_launch")):
        monkeypatch.setattr(module, launch, lambda: TileLaunch(1, NARROW, num_warps=1))
    monkeypatch.setattr(truncation, "search_launch", lambda _: TileLaunch(1, 128, num_warps=4, num_stages=3))


def random_logits(rows: int, vocab: int, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def columns_of(options: list[Option]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top_k = torch.tensor([k for k, _, _ in options])
    top_p, min_p = (torch.tensor([option[i] for option in options], dtype=torch.float32) for i in (1, 2))
    return top_k, top_p, min_p


def check_masks(
    logits: torch.Tensor,
    options: list[Option],
    device: torch.device,
    temperature: float = 1.0,
    unknown: Sequence[int] = (),
) -> torch.Tensor:
    """The kernels must leave exactly the tokens that the reference leaves; -> which, [N, V]."""
    expected = scores_of(logits, temperature, unknown)
    is_sound = expected.amax(1).isfinite()
    reference.sampling.mask_top_k_top_p_min_p(expected, *columns_of(options))
    kept = kept_of(logits, options, device, temperature, unknown)
    assert kept[is_sound].tolist() == (expected > -torch.inf)[is_sound].tolist()
    assert torch.equal(kept[~is_sound], torch.ones_like(kept[~is_sound]))
    return kept


def scores_of(logits: torch.Tensor, temperature: float = 1.0, unknown: Sequence[int] = ()) -> torch.Tensor:
    known = logits.float().index_fill(1, torch.tensor(unknown, dtype=torch.int64), -torch.inf)
    return (known - known.amax(1, keepdim=True)) / temperature + 0.0  # no -0


def kept_of(
    logits: torch.Tensor,
    options: list[Option],
    device: torch.device,
    temperature: float = 1.0,
    unknown: Sequence[int] = (),
) -> torch.Tensor:
    """Which tokens the thresholds leave, and min_p."""
    (num_rows, vocab), launch = logits.shape, gumbel.choose_launch()
    given, is_known = in_longer_rows(logits, device), torch.ones(vocab, dtype=torch.bool, device=device)
    is_known[list(unknown)] = False
    ranks = torch.empty(num_rows, triton.cdiv(vocab, launch.columns), dtype=torch.int64, device=device)
    _rank_kernel[ranks.shape](
        *(given, is_known, ranks, vocab, given.stride(0)), BLOCK=launch.columns, num_warps=launch.num_warps
    )
    limits = Truncation(*(column.to(device) for column in columns_of(options)))
    temperatures = torch.full((num_rows,), temperature, device=device)
    thresholds = find_thresholds(given, is_known, temperatures, ranks, limits)
    lowest, last = (threshold.cpu().unsqueeze(1) for threshold in thresholds)
    scores = scores_of(logits, temperature, unknown)
    bits = scores.view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    is_below = (keys < lowest) | ((keys == lowest) & (torch.arange(vocab) > last))
    is_unlikely = scores.exp() < limits.min_p.cpu().unsqueeze(1)
    is_sound = scores.amax(1, keepdim=True).isfinite()
    return ~is_below & (~is_unlikely & (scores > -torch.inf) | ~is_sound)


def mixed_options(vocab: int) -> list[Option]:
    return [
        (vocab, 1.0, 0.0),
        (1, 1.0, 0.0),
        (min(50, vocab), 1.0, 0.0),
        (vocab, 0.9, 0.0),
        (vocab, 0.0, 0.0),
        (vocab, 0.999, 0.0),
        (vocab, 1.0, 0.1),
        (vocab, 1.0, 1.0),
        (min(7, vocab), 0.5, 0.0),
        (min(400, vocab), 0.99, 0.01),
    ]


@pytest.mark.parametrize("vocab", [1, 137, 700])
def test_masks_are_those_of_the_reference(vocab: int, device: torch.device) -> None:
    check_masks(random_logits(10, vocab), mixed_options(vocab), device)


@pytest.mark.usefixtures("narrow_blocks")
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_logits_are_scaled_and_unknown_tokens_left_out(
    temperature: float, dtype: torch.dtype, device: torch.device
) -> None:
    logits = random_logits(10, 300, seed=5).to(dtype)
    kept = check_masks(logits, mixed_options(300), device, temperature, range(1, 300, 3))
    assert not kept[:, 1::3].any()


@pytest.mark.usefixtures("narrow_blocks")
@pytest.mark.parametrize("spread", [0.01, 6.0])
def test_masks_over_several_blocks_are_those_of_the_reference(spread: float, device: torch.device) -> None:
    # spread 0.01: the nucleus is most of the row; 6: the nucleus lies within the candidates.
    check_masks(random_logits(10, 461, spread=spread), mixed_options(461), device)


@pytest.mark.usefixtures("narrow_blocks")
def test_top_k_at_and_beyond_the_number_of_blocks_is_that_of_the_reference(device: torch.device) -> None:
    # 300 tokens are 19 blocks.
    options = [(k, p, 0.0) for k in (1, 18, 19, 20, 21, 60, 299) for p in (1.0, 0.8)]
    kept = check_masks(random_logits(len(options), 300), options, device)
    assert kept[::2].sum(1).tolist() == [1, 18, 19, 20, 21, 60, 299]


@pytest.mark.usefixtures("narrow_blocks")
@pytest.mark.parametrize("step", [0.25, 2.0])
def test_ties_lie_across_blocks_and_levels(step: float, device: torch.device) -> None:
    """Few values: a level may be one of them, the best of many blocks are equal, and so are all of a row."""
    logits = (random_logits(10, 333, seed=3) / step).round() * step
    logits[8:] = 1.5
    options = [(k, p, 0.0) for k in (3, 21, 40, 333) for p in (1.0, 0.7)] + [(30, 0.4, 0.0), (333, 0.9, 0.0)]
    check_masks(logits, options, device)
    check_masks(logits, [(333, p / 10, 0.0) for p in range(10)], device, temperature=0.7)


@pytest.mark.usefixtures("narrow_blocks")
def test_blocks_whose_best_is_low_are_left_out(device: torch.device) -> None:
    """All but 3 of 25 blocks lie 40 lower, weigh nothing, or hold no known token."""
    logits = random_logits(8, 400, seed=4, spread=1.0)
    logits[:, NARROW : 23 * NARROW] -= 40.0
    logits[4:6, NARROW : 23 * NARROW] = -torch.inf
    options: list[Option] = [(k, p, 0.0) for k in (4, 25, 47, 400) for p in (0.9, 0.4)]
    kept = check_masks(logits, options, device, unknown=range(8 * NARROW, 12 * NARROW))
    assert kept[6].sum() > 8
    assert not kept[6:, NARROW : 23 * NARROW].any()


@pytest.mark.usefixtures("narrow_blocks")
@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 4.0, 30.0])
def test_nuclei_of_every_size_end_between_their_levels(spread: float, device: torch.device) -> None:
    """Also above the first level, below the last, and with more candidates than a search takes at once."""
    logits = random_logits(12, 700, seed=6, spread=spread)
    logits[9:, 17] += 9.0 * spread  # one token alone
    shares = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999, 0.999999, 0.1, 0.9, 0.99]
    check_masks(logits, [(700, p, 0.0) for p in shares], device)


@pytest.mark.usefixtures("narrow_blocks")
def test_calls_in_the_same_memory_give_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph's replays do: counts of one call are none of the next, whose rows ask for something else."""
    memory: dict[tuple[Any, ...], torch.Tensor] = {}
    empty = torch.empty

    def kept_memory(*shape: Any, **kwargs: Any) -> torch.Tensor:
        key = (len(calls), *shape[1:], kwargs["dtype"])
        calls.append(key)
        return memory.setdefault(key, empty(9, *shape[1:], **kwargs))[: shape[0]]

    calls: list[tuple[Any, ...]] = []
    options: list[Option] = [(7, 0.9, 0.0), (40, 1.0, 0.0), (300, 0.8, 0.0), (300, 1.0, 0.0), (30, 0.5, 0.0)]
    logits = random_logits(5, 300, seed=7)
    monkeypatch.setattr(torch, "empty", kept_memory)
    for order in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [3, 0, 1], [2, 4, 3, 1, 0]):
        calls.clear()
        check_masks(logits[order], [options[i] for i in order], device)
        assert len(memory) == len(calls)


def test_rows_do_not_depend_on_their_order_or_number(device: torch.device) -> None:
    logits, options, order = random_logits(4, 6200, seed=8), mixed_options(6200)[-4:], [2, 1]
    together = check_masks(logits, options, device)
    assert torch.equal(check_masks(logits[order], [options[i] for i in order], device), together[order])


@pytest.mark.usefixtures("narrow_blocks")
def test_ties_are_cut_as_in_the_reference(device: torch.device) -> None:
    # Few distinct values: ties at the k-th token and across the edge of the nucleus.
    logits = random_logits(6, 300).round()
    options = [(10, 1.0, 0.0), (300, 0.6, 0.0), (300, 0.02, 0.0), (30, 0.5, 0.0), (40, 0.9, 0.3), (300, 0.97, 0.0)]
    check_masks(logits, options, device)
    check_masks(torch.zeros(3, 300), [(10, 0.5, 0.5), (300, 0.5, 0.0), (300, 0.3, 1.0)], device)


@pytest.mark.usefixtures("narrow_blocks")
def test_of_equal_tokens_at_the_edge_of_the_nucleus_the_lower_ones_stay(device: torch.device) -> None:
    logits = torch.zeros(2, 200)
    logits[1] = -torch.inf
    logits[1, 5::10] = 0.0
    logits[1, 155] = 1.0
    kept = check_masks(logits, [(200, 0.022, 0.0), (200, 0.3, 0.0)], device)
    assert [row.nonzero().flatten().tolist() for row in kept] == [[0, 1, 2, 3, 4], [5, 15, 25, 35, 155]]


def test_zeros_of_both_signs_are_equal(device: torch.device) -> None:
    logits = torch.tensor([[-1.0, 0.0, -0.0, 0.0, -2.0, -0.0]] * 3)
    check_masks(logits, [(1, 1.0, 0.0), (2, 1.0, 0.0), (6, 0.3, 0.0)], device)


@allows_nan
@pytest.mark.usefixtures("narrow_blocks")
def test_tokens_that_are_already_out_stay_out(device: torch.device) -> None:
    logits = random_logits(6, 200)
    logits[:, ::2] = -torch.inf
    logits[3:, 5:] = -torch.inf
    logits[5] = -torch.inf
    options = [(40, 0.9, 0.0), (200, 0.9, 0.0), (200, 1.0, 0.2), (10, 0.99, 0.0), (2, 1.0, 0.0), (10, 0.5, 0.5)]
    check_masks(logits, options, device)


@allows_nan
@pytest.mark.usefixtures("narrow_blocks")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_of_rows_that_are_not_finite_nothing_is_dropped(value: float, device: torch.device) -> None:
    logits = random_logits(6, 150)
    logits[:5, [3, 149]] = value
    options = [(1, 1.0, 0.0), (20, 0.5, 0.5), (150, 0.5, 0.0), (150, 1.0, 0.5), (2, 0.5, 0.0), (20, 0.5, 0.0)]
    check_masks(logits, options, device)


def test_of_rows_with_everything_off_nothing_is_dropped(device: torch.device) -> None:
    logits = random_logits(3, 300)
    logits[1, 3] = torch.nan
    kept = check_masks(logits, [(300, 1.0, 0.0), (300, 1.0, 0.0), (20, 1.0, 0.0)], device)
    assert kept.sum(1).tolist() == [300, 300, 20]


def test_a_nucleus_edge_on_an_exact_share_is_decided_as_in_the_reference(device: torch.device) -> None:
    # 16 equal shares: 1 - top_p falls exactly on a cumulative mass, which is then dropped.
    shares = [1, 2, 8, 11, 15]
    kept = check_masks(torch.zeros(len(shares), 16), [(16, j / 16, 0.0) for j in shares], device)
    assert kept.sum(1).tolist() == shares


@pytest.mark.parametrize("seed", range(2))
def test_masks_of_random_parameters_are_those_of_the_reference(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocab = 30 + 97 * seed
    top_k = torch.randint(1, vocab + 1, (8,), generator=generator).tolist()
    shares = torch.rand(8, 2, generator=generator).tolist()
    logits = random_logits(8, vocab, seed=seed, spread=[0.3, 1.0, 3.0, 20.0][seed])
    check_masks(logits, [(k, p, least**3) for k, (p, least) in zip(top_k, shares, strict=True)], device)


@pytest.mark.parametrize(("vocab", "spread"), [(50_021, 1.5), (151_936, 4.0)])
def test_masks_over_a_real_vocabulary_are_those_of_the_cpu(vocab: int, spread: float, device: torch.device) -> None:
    # spread 1.5: the nucleus of 0.8 has thousands of tokens.
    options = [(50, 0.95, 0.02), (vocab, 0.8, 0.0)]
    logits = random_logits(2, vocab, spread=spread)
    kept, expected_kept = kept_of(logits, options, device), kept_on_cpu(logits, options)
    assert kept[0].tolist() == expected_kept[0].tolist()
    # The float32 sum of 150,000 shares has errors of 1e-6, as much as some tokens of the flat row weigh.
    assert int((kept[1] != expected_kept[1]).sum()) <= 2
    assert int(kept[1].sum()) > (5000 if spread == 1.5 else 100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a vocabulary of 64 rows is for a GPU")
def test_masks_of_64_rows_over_a_real_vocabulary_are_those_of_the_cpu(device: torch.device) -> None:
    vocab = 151_936
    options = [(vocab, 1.0, 0.0), (50, 1.0, 0.0), (1, 0.5, 0.0), (20_000, 1.0, 0.0), (50, 0.9, 0.1), (vocab, 0.5, 0.0)]
    options, logits = (options * 11)[:64], random_logits(64, vocab, spread=4.0)
    differing = (kept_of(logits, options, device) != kept_on_cpu(logits, options)).sum(1)
    assert int(differing.max()) <= 1


def kept_on_cpu(logits: torch.Tensor, options: list[Option]) -> torch.Tensor:
    expected = logits - logits.amax(1, keepdim=True)
    cpu.sampling.mask_top_k_top_p_min_p(expected, *columns_of(options))
    return expected > -torch.inf


def test_more_tokens_than_masses_can_be_summed_of_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="up to 1048575"):
        kept_of(torch.zeros(1, MAX_VOCAB_SIZE + 1), [(5, 1.0, 0.0)], device)


def penalised(logits: torch.Tensor, pairs: tuple[torch.Tensor, ...], device: torch.device) -> torch.Tensor:
    actual = in_longer_rows(logits, device)
    apply_penalties(actual, *(tensor.to(device) for tensor in pairs))
    return actual.cpu()


@pytest.mark.parametrize(("rows", "vocab", "share"), [(1, 1, 1.0), (5, 333, 0.4), (3, 7, 0.3)])
def test_penalties_are_those_of_the_reference_to_the_bit(
    rows: int, vocab: int, share: float, device: torch.device
) -> None:
    # 5 x 333 x 0.4: 666 pairs, three blocks, the last one short.
    generator = torch.Generator().manual_seed(2)
    places = (torch.rand(rows, vocab, generator=generator) <= share).nonzero(as_tuple=True)
    counts = torch.randint(-4, 9, places[0].shape, generator=generator).clamp(min=0).int()
    repetition = torch.tensor([1.3, 1.0, 0.5, 1.7, 1.1])[:rows]
    presence = torch.tensor([0.1, 0.5, -1.0, 2.0, 0.0])[:rows]
    frequency = torch.tensor([0.7, 0.25, 0.0, -0.3, 2.0])[:rows]
    logits = random_logits(rows, vocab)
    logits[:, 5:6] = -torch.inf
    pairs = (*places, counts, repetition, presence, frequency)
    expected = logits.clone()
    reference.apply_penalties(expected, *pairs)
    assert_close(penalised(logits, pairs, device), expected, max_steps=0, rms_steps=0)


def test_no_pairs_and_no_rows_change_nothing(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    logits = random_logits(2, 5)
    ones = torch.ones(2)
    assert torch.equal(penalised(logits, (none, none, none.int(), ones, ones, ones), device), logits)
