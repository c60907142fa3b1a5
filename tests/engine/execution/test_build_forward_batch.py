"""From items to tensors: exact slots, positions and tables."""

from __future__ import annotations

import torch

from engine.execution.build_forward_batch import build_forward_batch
from engine.execution.forward_item import ForwardItem
from kernels.attention_rows import AttentionRows
from kernels.prefix_group import PrefixGroup

CPU = torch.device("cpu")


def _lists(rows: AttentionRows | None) -> tuple[list[list[int]], list[int], list[int]]:
    assert rows is not None
    return rows.block_tables.tolist(), rows.cu_seqlens_q.tolist(), rows.seq_lens.tolist()


def test_decode_rows_go_first_and_logits_keep_the_order_of_the_items() -> None:
    batch = build_forward_batch(
        [
            ForwardItem([10, 11, 12], start=2, block_table=[5, 3], wants_logits=True),
            ForwardItem([20], start=8, block_table=[7, 1, 9], wants_logits=True),
            ForwardItem([30, 31], start=0, block_table=[2], wants_logits=False),
            ForwardItem([40], start=0, block_table=[4], wants_logits=True),
        ],
        block_size=4,
        device=CPU,
    )
    assert batch.token_ids.tolist() == [20, 40, 10, 11, 12, 30, 31]
    assert batch.positions.tolist() == [8, 0, 2, 3, 4, 0, 1]
    assert batch.slot_mapping.tolist() == [36, 16, 22, 23, 12, 8, 9]
    assert batch.logits_indices.tolist() == [4, 0, 1]
    assert batch.num_decode_tokens == 2
    assert batch.num_tokens == 7
    assert _lists(batch.decode) == ([[7, 1, 9], [4, 0, 0]], [0, 1, 2], [9, 1])
    assert _lists(batch.prefill) == ([[5, 3], [2, 0]], [0, 3, 5], [5, 2])


def test_a_batch_of_one_kind_has_no_rows_of_the_other() -> None:
    decode_only = build_forward_batch([ForwardItem([1], 0, [1], True)], 16, CPU)
    assert decode_only.prefill is None
    prefill_only = build_forward_batch([ForwardItem([1, 2], 0, [1], False)], 16, CPU)
    assert prefill_only.decode is None
    assert prefill_only.logits_indices.tolist() == []


def test_blocks_a_sequence_holds_beyond_this_step_are_left_out() -> None:
    batch = build_forward_batch([ForwardItem([1, 2], 2, [6, 8, 9], True)], 4, CPU)
    assert _lists(batch.prefill) == ([[6]], [0, 2], [4])


def test_the_index_types_are_those_the_kernels_ask_for() -> None:
    batch = build_forward_batch([ForwardItem([1], 0, [1], True)], 16, CPU)
    for tensor in (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_indices):
        assert tensor.dtype == torch.int64
    assert batch.decode is not None
    for tensor in (batch.decode.block_tables, batch.decode.cu_seqlens_q, batch.decode.seq_lens):
        assert tensor.dtype == torch.int32


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
    batch = build_forward_batch(items, 4, CPU, (_always, _always))
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
    batch = build_forward_batch(items, 4, CPU)
    assert batch.token_ids.tolist() == [0, 1, 2, 3]
    assert batch.decode is not None
    assert batch.decode.prefix_groups == ()
