"""From items to tensors: exact slots, positions and tables."""

from __future__ import annotations

import numpy as np

from engine.execution.batch import ForwardItem, PlannedRows, plan_batch
from engine.execution.prefix_groups import Gate
from kernels.attention_types import PrefixGroup


def _lists(rows: PlannedRows | None) -> tuple[list[list[int]], list[int], list[int]]:
    assert rows is not None
    return rows.block_tables.tolist(), rows.cu_seqlens_q.tolist(), rows.seq_lens.tolist()


def test_decode_rows_go_first_and_logits_keep_the_order_of_the_items() -> None:
    batch = plan_batch(
        [
            ForwardItem([10, 11, 12], start=2, block_table=[5, 3], wants_logits=True),
            ForwardItem([20], start=8, block_table=[7, 1, 9], wants_logits=True),
            ForwardItem([30, 31], start=0, block_table=[2], wants_logits=False),
            ForwardItem([40], start=0, block_table=[4], wants_logits=True),
        ],
        block_size=4,
    )
    assert batch.token_ids.tolist() == [20, 40, 10, 11, 12, 30, 31]
    assert batch.positions.tolist() == [8, 0, 2, 3, 4, 0, 1]
    assert batch.slot_mapping.tolist() == [36, 16, 22, 23, 12, 8, 9]
    assert batch.logits_indices.tolist() == [4, 0, 1]
    assert batch.num_tokens == 7
    assert _lists(batch.decode) == ([[7, 1, 9], [4, 0, 0]], [0, 1, 2], [9, 1])
    assert _lists(batch.prefill) == ([[5, 3], [2, 0]], [0, 3, 5], [5, 2])


def test_a_batch_of_one_kind_has_no_rows_of_the_other() -> None:
    decode_only = plan_batch([ForwardItem([1], 0, [1], True)], 16)
    assert decode_only.prefill is None
    prefill_only = plan_batch([ForwardItem([1, 2], 0, [1], False)], 16)
    assert prefill_only.decode is None
    assert prefill_only.logits_indices.tolist() == []


def test_blocks_a_sequence_holds_beyond_this_step_are_left_out() -> None:
    batch = plan_batch([ForwardItem([1, 2], 2, [6, 8, 9], True)], 4)
    assert _lists(batch.prefill) == ([[6]], [0, 2], [4])


def test_the_index_types_are_those_the_kernels_ask_for() -> None:
    batch = plan_batch([ForwardItem([1], 0, [1], True)], 16)
    for array in (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_indices):
        assert array.dtype == np.int64
    assert batch.decode is not None
    assert [array.dtype for array in batch.decode.arrays] == [np.int32] * 3


def _always(num_rows: int, num_tokens: int) -> bool:
    return True


def test_rows_that_begin_alike_become_neighbours_and_logits_keep_the_order_of_the_items() -> None:
    items = [
        ForwardItem([10], 5, [1, 2], wants_logits=True),
        ForwardItem([20], 6, [7, 8], wants_logits=True),
        ForwardItem([30], 4, [1, 3], wants_logits=True),
        ForwardItem([40, 41], 8, [5, 6, 9], wants_logits=True),
        ForwardItem([50, 51, 52], 4, [4, 9], wants_logits=False),
        ForwardItem([60, 61], 8, [5, 6, 10], wants_logits=True),
    ]
    batch = plan_batch(items, 4, (_always, _always))
    assert batch.token_ids.tolist() == [10, 30, 20, 40, 41, 60, 61, 50, 51, 52]
    assert batch.positions.tolist() == [5, 4, 6, 8, 9, 8, 9, 4, 5, 6]
    assert batch.slot_mapping.tolist() == [9, 12, 34, 36, 37, 40, 41, 36, 37, 38]
    assert batch.logits_indices.tolist() == [0, 2, 1, 4, 6]
    assert _lists(batch.decode) == ([[1, 2], [1, 3], [7, 8]], [0, 1, 2, 3], [6, 5, 7])
    assert _lists(batch.prefill) == ([[5, 6, 9], [5, 6, 10], [4, 9, 0]], [0, 2, 4, 7], [10, 10, 7])
    assert batch.decode is not None
    assert batch.prefill is not None
    assert batch.decode.prefix_groups == (PrefixGroup(0, 2, 4),)
    assert batch.prefill.prefix_groups == (PrefixGroup(0, 2, 8),)


def test_without_gates_rows_that_begin_alike_are_left_where_they_are() -> None:
    items = [ForwardItem([i], 4, [1 + i % 2, 3 + i], wants_logits=True) for i in range(4)]
    batch = plan_batch(items, 4)
    assert batch.token_ids.tolist() == [0, 1, 2, 3]
    assert batch.decode is not None
    assert batch.decode.prefix_groups == ()


def test_a_plain_decode_is_one_query_an_item_whose_logits_alone_are_wanted() -> None:
    def is_plain(*items: ForwardItem, gates: tuple[Gate, Gate] | None = None) -> bool:
        return plan_batch(items, 4, gates).is_plain_decode

    row = ForwardItem([1], 5, [1, 2], wants_logits=True)
    assert is_plain(row, ForwardItem([2], 8, [3, 4, 5], wants_logits=True))
    assert not is_plain(row, ForwardItem([2, 3], 8, [3, 4, 5], wants_logits=True))
    assert not is_plain(row, ForwardItem([2], 8, [3, 4, 5], wants_logits=False))
    assert not is_plain(row, ForwardItem([2], 8, [3, 4, 5], wants_logits=True, wants_hidden=True))
    assert not is_plain(row, ForwardItem([2], 8, [1, 4, 5], wants_logits=True), gates=(_always, _always))
