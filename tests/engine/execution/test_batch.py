"""From scheduled items to tensors: exact slots, positions and tables, in one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine import staging as staging_buffer
from engine.execution.batch import ForwardItem, PlannedRows, fill_in, pending_token, plan_batch
from engine.execution.prefix_groups import Gate
from engine.staging import ArrayStaging, StagingBuffer, pack, unpack
from kernels.operands import PrefixGroup

CPU = torch.device("cpu")
ITEMS = [
    ForwardItem([20], start=8, block_table=[7, 1, 9], wants_logits=True),
    ForwardItem([10, 11, 12], start=2, block_table=[5, 3], wants_logits=True, wants_hidden=True),
    ForwardItem([40], start=0, block_table=[4], wants_logits=True),
]


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


def test_the_last_layer_of_a_step_with_chunks_ends_with_last_tokens() -> None:
    items = [
        ForwardItem([10, 11, 12], start=2, block_table=[5, 3], wants_logits=True),
        ForwardItem([20], start=8, block_table=[7, 1, 9], wants_logits=True),
        ForwardItem([30, 31], start=4, block_table=[5, 2], wants_logits=True),
    ]
    batch = plan_batch(items, 4, narrows=True)
    assert _lists(batch.last) == ([[7, 1, 9], [5, 3, 0], [5, 2, 0]], [0, 1, 2, 3], [9, 5, 6])
    assert batch.last_indices.tolist() == [0, 3, 5]  # into the tokens
    assert batch.logits_indices.tolist() == [1, 0, 2]  # into the rows
    grouped = plan_batch([items[1], *items], 4, (_always, lambda *_: False), narrows=True)
    assert grouped.last is not None
    assert grouped.last.prefix_groups == (PrefixGroup(0, 2, 8),)


def test_where_hidden_states_are_wanted_the_last_layer_is_like_others() -> None:
    assert plan_batch(ITEMS, 4, narrows=True).last is None
    assert plan_batch([ITEMS[0], ITEMS[2]], 4, narrows=True).last is None  # decode alone


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


def test_rows_that_begin_alike_are_neighbours_and_logits_keep_their_order() -> None:
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


def test_a_plain_step_wants_the_logits_of_each_item_and_nothing_else() -> None:
    def is_plain(*items: ForwardItem, gates: tuple[Gate, Gate] | None = None) -> bool:
        return plan_batch(items, 4, gates).is_plain

    row = ForwardItem([1], 5, [1, 2], wants_logits=True)
    assert is_plain(row, ForwardItem([2], 8, [3, 4, 5], wants_logits=True))
    assert is_plain(row, ForwardItem([2, 3], 8, [3, 4, 5], wants_logits=True))
    assert not plan_batch([row, ForwardItem([2, 3], 8, [3, 4, 5], wants_logits=True)], 4, narrows=True).is_plain
    assert not is_plain(row, ForwardItem([2], 8, [3, 4, 5], wants_logits=False))
    assert not is_plain(row, ForwardItem([2], 8, [3, 4, 5], wants_logits=True, wants_hidden=True))
    assert not is_plain(row, ForwardItem([2], 8, [1, 4, 5], wants_logits=True), gates=(_always, _always))


def test_each_place_gets_the_token_of_the_row_it_names_and_known_ones_stay() -> None:
    token_ids = torch.tensor([5, pending_token(2), 0, pending_token(0), pending_token(2)])
    fill_in(token_ids, torch.tensor([70, 71, 72]))
    assert token_ids.tolist() == [5, 72, 0, 70, 72]


def test_tensors_of_any_type_and_shape_come_out_as_they_went_in() -> None:
    tensors = [
        torch.tensor([True, False, True]),
        torch.randn(3, 5),
        torch.arange(7) - 3,
        torch.empty(2, 0),
        torch.randn(4, 6).t()[1:],
        torch.arange(5, dtype=torch.int32),
        torch.randn(3).bfloat16(),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    packed = pack(tensors)
    assert packed.shape == (sum(tensor.nbytes for tensor in tensors),)
    for found, expected in zip(unpack(packed, tensors), tensors, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)


def test_one_alone_is_not_copied() -> None:
    tensor = torch.arange(4)
    packed = pack([tensor])
    assert packed.data_ptr() == tensor.data_ptr()
    assert torch.equal(unpack(packed, [tensor])[0], tensor)


class RecordingEvent:
    def __init__(self, *, is_over: bool = False) -> None:
        self.calls: list[str] = []
        self._is_over = is_over

    def record(self) -> None:
        self.calls.append("record")

    def query(self) -> bool:
        return self._is_over

    def synchronize(self) -> None:
        self.calls.append("wait")


def _arrays(seed: int, *shapes: tuple[int, ...]) -> list[npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    dtypes = (np.int32, np.int64)
    return [rng.integers(0, 99, shape).astype(dtypes[i % 2]) for i, shape in enumerate(shapes)]


def test_arrays_arrive_whole_at_multiples_of_16_bytes() -> None:
    arrays = _arrays(0, (3,), (5,), (2, 3), (0,), (1,), (7, 1))
    arrays.append(np.arange(12, dtype=np.int32).reshape(3, 4).T)  # does not lie in one piece
    sent = StagingBuffer(CPU, RecordingEvent()).send(arrays)
    for tensor, array in zip(sent, arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1


def test_nothing_is_written_before_the_last_copy_out_of_the_buffer_is_over() -> None:
    event = RecordingEvent()
    buffer = StagingBuffer(CPU, event)
    buffer.send(_arrays(0, (3,)))
    buffer.send(_arrays(1, (3,)))
    assert event.calls == ["wait", "record"] * 2


def test_a_copy_that_is_over_is_not_waited_for() -> None:
    event = RecordingEvent(is_over=True)
    buffer = StagingBuffer(CPU, event)
    for seed in range(3):
        (sent,) = buffer.send(_arrays(seed, (3,)))
        assert torch.equal(sent, torch.from_numpy(_arrays(seed, (3,))[0]))
    assert event.calls == ["record"] * 3


def test_a_pair_leaves_the_tensors_of_the_step_before_alone() -> None:
    buffers = StagingBuffer.pair(CPU)
    arrays = [_arrays(seed, (40, 2), (9,)) for seed in range(3)]
    first, second = (next(buffers).send(arrays[i]) for i in range(2))
    for tensor, array in zip((*first, *second), (*arrays[0], *arrays[1]), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
    third = next(buffers).send(arrays[2])
    assert third[0].data_ptr() == first[0].data_ptr()
    assert torch.equal(second[0], torch.from_numpy(arrays[1][0]))


def test_a_buffer_grows_in_powers_of_two_and_never_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_buffer, "LEAST_BYTES", 64)
    buffer = StagingBuffer(CPU, RecordingEvent())
    sizes = []
    for count in (1, 16, 17, 100, 3):
        (sent,) = buffer.send([np.arange(count, dtype=np.int32)])
        assert sent.tolist() == list(range(count))
        sizes.append(sent.untyped_storage().nbytes())
    assert sizes == [64, 64, 128, 512, 512]


def test_a_staged_batch_is_the_plan() -> None:
    planned = plan_batch(ITEMS, 4)
    on_cpu = planned.on_device(ArrayStaging(CPU).send(planned.arrays))
    packed = planned.on_device(StagingBuffer(CPU, RecordingEvent()).send(planned.arrays))
    for batch in (on_cpu, packed):
        assert batch.token_ids.tolist() == [20, 40, 10, 11, 12]
        assert batch.positions.tolist() == [8, 0, 2, 3, 4]
        assert batch.logits_indices.tolist() == [0, 4, 1]
        assert batch.hidden_indices.tolist() == [2, 3, 4]
        assert (batch.hidden_lens, batch.num_decode_tokens) == ((3,), 2)
        assert batch.decode is not None
        assert batch.prefill is not None
        assert batch.decode.block_tables.tolist() == [[7, 1, 9], [4, 0, 0]]
        assert (batch.decode.query_lens, batch.decode.kv_lens) == ((1, 1), (9, 1))
        assert batch.prefill.block_tables.tolist() == [[5, 3]]
        assert batch.prefill.seq_lens.tolist() == [5]
        assert (batch.prefill.query_lens, batch.prefill.kv_lens) == ((3,), (5,))


def test_on_a_cpu_nothing_is_copied() -> None:
    planned = plan_batch(ITEMS, 4)
    assert (
        planned.on_device(ArrayStaging(CPU).send(planned.arrays)).token_ids.data_ptr() == planned.token_ids.ctypes.data
    )
