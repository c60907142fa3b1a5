"""Requests through the engine with attention over shared prefixes on and off: the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from engine.errors import CapabilityError
from engine.execution import batch as planner
from engine.execution import forward as step_executor
from engine.execution.batch import ForwardItem, PlannedBatch
from engine.execution.prefix_groups import Gate
from engine.request import Request
from engine.sampling_params import SamplingParams
from kernels.attention_types import PrefixGroup
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of

NUM_TOKENS = 24
Groups = tuple[PrefixGroup, ...]


def _always(num_rows: int, num_tokens: int) -> bool:
    return True


class Seen:
    """The groups of decode rows and of chunks in each forward pass."""

    def __init__(self) -> None:
        self.passes: list[tuple[Groups, Groups]] = []

    def plan(
        self, items: Sequence[ForwardItem], block_size: int, gates: tuple[Gate, Gate] | None = None
    ) -> PlannedBatch:
        batch = planner.plan_batch(items, block_size, gates)
        decode, prefill = (rows.prefix_groups if rows else () for rows in (batch.decode, batch.prefill))
        self.passes.append((decode, prefill))
        return batch

    @property
    def decode_rows(self) -> set[int]:
        """Sizes of the groups of decode rows."""
        return {group.num_rows for decode, _ in self.passes for group in decode}

    @property
    def chunk_rows(self) -> set[int]:
        """Sizes of the groups of chunks."""
        return {group.num_rows for _, prefill in self.passes for group in prefill}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the engines of this test see; every group passes their gates, since the models are tiny."""
    seen = Seen()
    for name, value in {"DECODE_GATE": _always, "PREFILL_GATE": _always, "plan_batch": seen.plan}.items():
        monkeypatch.setattr(step_executor, name, value)
    return seen


def _prompts(seed: int, counts: Sequence[int], shared_tokens: int = 40) -> list[list[int]]:
    """Prompts of some groups, shuffled; the members of a group begin with the same tokens."""
    rng = random.Random(seed)
    prompts = []
    for count in counts:
        prefix = [rng.randrange(256) for _ in range(shared_tokens)]
        prompts += [[*prefix, *(rng.randrange(256) for _ in range(rng.randrange(1, 30)))] for _ in range(count)]
    rng.shuffle(prompts)
    return prompts


def _run(path: Path, requests: Sequence[Request], enabled: str, **options: str) -> dict[str, list[int]]:
    overrides = {f"engine.{key.replace('__', '.')}": value for key, value in options.items()}
    engine = load_engine(path, {"engine.shared_prefix.enabled": enabled, "engine.deduplicate": "off"} | overrides)
    return {name: tokens_of(output) for name, output in run_all(engine, requests).items()}


def _greedy(prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [greedy_request(str(i), prompt, NUM_TOKENS - i % 5) for i, prompt in enumerate(prompts)]


def _check(path: Path, requests: Sequence[Request], seen: Seen, **options: str) -> None:
    expected = _run(path, requests, "off", **options)
    assert all(groups == ((), ()) for groups in seen.passes)
    assert _run(path, requests, "on", **options) == expected
    assert seen.decode_rows


def test_groups_of_several_sizes_and_rows_in_none(moe_checkpoint: Path, seen: Seen) -> None:
    _check(moe_checkpoint, _greedy(_prompts(1, [9, 4, 2, 1, 1])), seen)
    assert {9, 4, 2} <= seen.decode_rows
    assert seen.chunk_rows


def test_chunks_and_decode_rows_in_one_step_with_groups_of_both(moe_checkpoint: Path, seen: Seen) -> None:
    _check(moe_checkpoint, _greedy(_prompts(2, [8, 8])), seen, max_num_batched_tokens="24", max_num_seqs="12")
    assert any(decode and prefill for decode, prefill in seen.passes)


def test_groups_appear_and_vanish_as_requests_come_and_go(moe_checkpoint: Path, seen: Seen) -> None:
    _check(moe_checkpoint, _greedy(_prompts(3, [3, 3, 3, 3])), seen, max_num_seqs="4")
    kinds = [bool(decode) for decode, _ in seen.passes]
    assert sum(before != after for before, after in pairwise(kinds)) >= 3


@pytest.mark.parametrize("prefix_cache", ["on", "off"])
def test_after_preemption(moe_checkpoint: Path, seen: Seen, prefix_cache: str) -> None:
    requests = _greedy(_prompts(4, [6, 6]))
    options = {"kv_cache__num_blocks": "24", "prefix_cache__enabled": prefix_cache}
    expected = _run(moe_checkpoint, requests, "off", **options)
    assert _run(moe_checkpoint, requests, "on", **options) == expected
    assert bool(seen.decode_rows) == (prefix_cache == "on")  # without the cache no two requests hold the same block


def test_equal_prompts(moe_checkpoint: Path, seen: Seen) -> None:
    prompt = _prompts(5, [1], shared_tokens=64)[0]
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(6)]
    requests = [Request(str(i), tuple(prompt), one) for i, one in enumerate(params)]
    _check(moe_checkpoint, requests, seen)
    assert 6 in seen.decode_rows


def test_prompts_that_are_prefixes_of_one_another(moe_checkpoint: Path, seen: Seen) -> None:
    tokens = _prompts(6, [1], shared_tokens=150)[0]
    _check(moe_checkpoint, _greedy([tokens[:length] for length in range(17, 145, 8)]), seen)


def test_in_bfloat16_the_groups_are_the_same(moe_checkpoint: Path, seen: Seen) -> None:
    _run(moe_checkpoint, _greedy(_prompts(7, [5, 4])), "on", dtype="bfloat16")
    assert {5, 4} <= seen.decode_rows


def test_the_gates_of_the_engine_leave_small_groups_alone(
    moe_checkpoint: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(step_executor, "plan_batch", seen.plan)
    _run(moe_checkpoint, _greedy(_prompts(8, [3, 12], shared_tokens=400)), "on")
    assert 12 in seen.decode_rows
    assert min(seen.decode_rows) >= 8


def test_it_is_on_by_default_on_a_cpu(moe_checkpoint: Path) -> None:
    assert load_engine(moe_checkpoint).settings.engine.shared_prefix.enabled is True
    assert (
        load_engine(moe_checkpoint, {"engine.shared_prefix.enabled": "off"}).settings.engine.shared_prefix.enabled
        is False
    )


def test_it_is_off_with_deterministic_and_refused_where_both_are_asked_for(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.deterministic": "on"})
    assert engine.settings.engine.shared_prefix.enabled is False
    with pytest.raises(CapabilityError, match=r"engine\.shared_prefix\.enabled=true.*accepted: none, false"):
        load_engine(moe_checkpoint, {"engine.deterministic": "on", "engine.shared_prefix.enabled": "on"})
