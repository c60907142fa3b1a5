from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_gather import SEGMENT_TOKENS, KeyRange, KvGatherPlan

BLOCK = 16


def build(
    kv_lens: list[int], query_lens: list[int] | None = None, max_tokens: int = 4096, first: int = 0
) -> KvGatherPlan:
    """first: blocks at the head of each row that are not read."""
    width = max([-(-n // BLOCK) for n in kv_lens], default=0)
    tables = torch.zeros(len(kv_lens), width, dtype=torch.int32)
    for row, kv_len in enumerate(kv_lens):
        used = -(-kv_len // BLOCK)
        tables[row, :used] = torch.arange(used) + 1000 * (row + 1)
    lens = query_lens or [1] * len(kv_lens)
    keys = [
        KeyRange(row, sum(lens[:row]), first * BLOCK, kv_len)
        for row, (query_len, kv_len) in enumerate(zip(lens, kv_lens, strict=True))
        if query_len == 1 and kv_len > first * BLOCK
    ]
    return KvGatherPlan.build(tables, keys, BLOCK, max_tokens)


def keys_of(plan: KvGatherPlan) -> dict[int, list[tuple[int, int]]]:
    """Query -> the (block, offset) of every key it reads and does not mask, in order."""
    keys: dict[int, list[tuple[int, int]]] = {}
    for gather in plan.gathers:
        padding = set(gather.padding_ids.tolist())
        for index, query in enumerate(gather.query_ids.tolist()):
            for token in range(gather.num_tokens):
                place = index * gather.num_tokens + token
                masked = gather.mask is not None and bool(gather.mask[index, 0, 0, token] == -torch.inf)
                assert masked == (place in padding)
                if not masked:
                    keys.setdefault(query, []).append((int(gather.block_ids[place // BLOCK]), place % BLOCK))
    return keys


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 1, 1, 3]), st.integers(0, 700)), max_size=12),
    st.sampled_from([16, 64, 512, 4096]),
    st.sampled_from([0, 0, 1, 5]),
)
def test_every_single_query_row_reads_each_of_its_keys_once_and_in_order(
    lens: list[tuple[int, int]], max_tokens: int, first: int
) -> None:
    query_lens, kv_lens = [q for q, _ in lens], [kv for _, kv in lens]
    keys = keys_of(build(kv_lens, query_lens, max_tokens, first))
    expected = {}
    for row, (query_len, kv_len) in enumerate(lens):
        if query_len == 1 and kv_len > first * BLOCK:
            expected[sum(query_lens[:row])] = [
                (1000 * (row + 1) + token // BLOCK, token % BLOCK) for token in range(first * BLOCK, kv_len)
            ]
    assert keys == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=80))
def test_gathers_are_bounded_and_waste_at_most_a_fifth_of_what_they_read(kv_lens: list[int]) -> None:
    plan = build(kv_lens)
    for gather in plan.gathers:
        total = gather.num_ranges * gather.num_tokens
        assert total <= 4096
        assert len(set(gather.query_ids.tolist())) == gather.num_ranges
        # A block is padding as a whole; the open end of a row's last block is not waste that grouping could avoid.
        blocks = gather.padding_ids.reshape(-1) // BLOCK
        whole = (torch.bincount(blocks, minlength=total // BLOCK) == BLOCK).sum() if len(blocks) else 0
        assert total <= 1024 or whole * BLOCK * 5 <= total


def test_rows_of_equal_whole_blocks_need_no_mask() -> None:
    plan = build([64, 64, 64])
    assert len(plan.gathers) == 1
    assert plan.gathers[0].mask is None
    assert plan.gathers[0].padding_ids.shape == (0,)


def test_a_long_row_is_cut_at_absolute_positions_whatever_its_neighbours() -> None:
    alone = build([5000])
    beside = build([5000, 4900, 300])
    assert alone.num_segments == beside.num_segments == -(-5000 // SEGMENT_TOKENS)
    assert [gather.num_tokens for gather in alone.gathers] == [2048, 2048, 912]
    assert keys_of(alone)[0] == keys_of(beside)[0]


def test_no_single_query_rows_make_an_empty_plan() -> None:
    plan = build([20, 30], [2, 3])
    assert plan.gathers == ()
    assert plan.num_segments == 0
