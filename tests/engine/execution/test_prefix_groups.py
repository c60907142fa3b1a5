"""Groups of rows that share leading blocks: how they are found, and the same tokens with and without them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CapabilityError
from engine.execution import batch as planner
from engine.execution import forward as step_executor
from engine.execution.batch import ForwardItem, PlannedBatch
from engine.execution.prefix_groups import DECODE_GATE, PREFILL_GATE, Gate, find_prefix_groups
from engine.request import Request
from engine.sampling_params import SamplingParams
from kernels.operands import PrefixGroup
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of

BLOCK = 16

NUM_TOKENS = 24
Groups = tuple[PrefixGroup, ...]


def _always(num_rows: int, num_tokens: int) -> bool:
    return True


def find(
    tables: list[list[int]], num_shareable: list[int] | None = None, gate: object = _always
) -> tuple[list[int], tuple[PrefixGroup, ...]]:
    """Groups of rows, all of whose blocks but the last may be shared unless said otherwise."""
    assert callable(gate)
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    shareable = [len(table) - 1 for table in tables] if num_shareable is None else num_shareable
    return find_prefix_groups(padded, np.array(shareable, dtype=np.int64), BLOCK, gate)


def test_rows_without_a_common_beginning_stay_where_they_are() -> None:
    assert find([[9, 1], [3, 1], [5, 1]]) == ([0, 1, 2], ())
    assert find([[4, 1]]) == ([0], ())


def test_members_of_groups_become_neighbours_and_the_others_follow() -> None:
    order, groups = find([[1, 2, 3], [7, 8], [5, 6, 9], [1, 2, 4], [5, 6, 10], [1, 2, 11]])
    assert order == [0, 3, 5, 2, 4, 1]
    assert groups == (PrefixGroup(0, 3, 32), PrefixGroup(3, 2, 32))


def test_a_block_that_holds_a_rows_own_queries_is_not_shared() -> None:
    assert find([[1, 2, 3], [1, 2, 3]], [1, 3])[1] == (PrefixGroup(0, 2, 16),)
    assert find([[1, 2, 3], [1, 2, 3]], [0, 3])[1] == ()


def test_equal_tables_share_all_that_may_be_shared() -> None:
    assert find([[1, 2, 3]] * 3, [2, 3, 3])[1] == (PrefixGroup(0, 3, 32),)


def test_of_nested_beginnings_the_level_that_saves_most_is_taken() -> None:
    system, examples = [1, 2], [3, 4, 5, 6, 7, 8]
    deep = [[*system, *examples, 100 + i] for i in range(4)]
    # 3 rows more at 8 blocks save 24; all 9 at 2 blocks 16; both, the others at 2 blocks, 24 + 8.
    order, groups = find(deep + [[*system, 200 + i] for i in range(5)])
    assert groups == (PrefixGroup(0, 5, 32), PrefixGroup(5, 4, 128))
    assert order == [4, 5, 6, 7, 8, 0, 1, 2, 3]
    # Pairs with one block more than all: 7 x 2 blocks saved by all in one, 4 x 3 by the pairs.
    pairs = [[*system, 10 + i // 2, 300 + i] for i in range(8)]
    assert find(pairs)[1] == (PrefixGroup(0, 8, 32),)
    # The same with four blocks more: 4 x 6 by the pairs.
    pairs = [[*system, *(1000 * (i // 2) + j for j in range(10, 14)), 300 + i] for i in range(8)]
    assert find(pairs)[1] == tuple(PrefixGroup(2 * i, 2, 96) for i in range(4))


def test_a_group_below_the_gate_leaves_its_rows_to_a_shorter_prefix() -> None:
    tables = [[1, 2 + i // 2, 100 + i] for i in range(6)]
    assert find(tables, gate=lambda num_rows, num_tokens: num_rows > 2)[1] == (PrefixGroup(0, 6, 16),)
    assert find(tables, gate=lambda num_rows, num_tokens: num_rows > 6) == (list(range(6)), ())


def test_the_gates_ask_for_enough_rows_and_tokens() -> None:
    assert DECODE_GATE(16, 384)
    assert DECODE_GATE(64, 64)
    assert not DECODE_GATE(64, 32)
    assert not DECODE_GATE(4, 4096)
    assert not DECODE_GATE(8, 128)
    assert PREFILL_GATE(2, 16)
    assert not PREFILL_GATE(2, 8)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=12), st.data())
def test_groups_keep_what_they_promise(paths: list[list[int]], data: st.DataObject) -> None:
    # Blocks as a prefix tree gives them: the same id for the same path from the root.
    tables = [[int("1" + "".join(map(str, path[: i + 1]))) for i in range(len(path))] for path in paths]
    shareable = [data.draw(st.integers(0, len(table))) for table in tables]
    order, groups = find(tables, shareable)
    assert sorted(order) == list(range(len(tables)))
    end = 0
    for first_row, num_rows, num_tokens in groups:
        assert first_row >= end
        assert num_rows >= 2
        end = first_row + num_rows
        blocks = num_tokens // BLOCK
        assert blocks > 0
        members = order[first_row:end]
        assert members == sorted(members)
        assert len({tuple(tables[row][:blocks]) for row in members}) == 1
        assert all(shareable[row] >= blocks for row in members)


def test_sixty_four_rows_of_thirty_two_blocks_take_well_under_a_step() -> None:
    tables = [[*range(1 + 100 * (i % 4), 25 + 100 * (i % 4)), *range(1000 + 8 * i, 1008 + 8 * i)] for i in range(64)]
    times_s = []
    for _ in range(20):
        start = time.thread_time()
        order, groups = find(tables)
        times_s.append(time.thread_time() - start)
    assert [group.num_rows for group in groups] == [16] * 4
    assert [i % 4 for i in order] == [0] * 16 + [1] * 16 + [2] * 16 + [3] * 16
    assert min(times_s) < 5e-3  # 0.3 ms on a quiet machine


class Seen:
    """The groups of decode rows and of chunks in each forward pass."""

    def __init__(self) -> None:
        self.passes: list[tuple[Groups, Groups]] = []

    def plan(
        self, items: Sequence[ForwardItem], block_size: int, gates: tuple[Gate, Gate] | None = None, *, narrows: bool
    ) -> PlannedBatch:
        batch = planner.plan_batch(items, block_size, gates, narrows=narrows)
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
    """The groups that this test's engines find; all pass the gates, since the models are tiny."""
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
