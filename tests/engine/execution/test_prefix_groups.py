"""Groups of rows from equal leading blocks of their block tables."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.prefix_groups import DECODE_GATE, PREFILL_GATE, find_prefix_groups
from kernels.attention_types import PrefixGroup

BLOCK = 16


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


def test_a_group_that_does_not_pass_the_gate_leaves_its_rows_to_a_shorter_prefix() -> None:
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
