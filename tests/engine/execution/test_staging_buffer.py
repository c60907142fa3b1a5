"""Many arrays, one copy; a buffer that may still be read is not written."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine import staging as staging_buffer
from engine.execution.batch import BatchStaging, ForwardItem, plan_batch
from engine.staging import StagingBuffer

CPU = torch.device("cpu")
ITEMS = [
    ForwardItem([20], start=8, block_table=[7, 1, 9], wants_logits=True),
    ForwardItem([10, 11, 12], start=2, block_table=[5, 3], wants_logits=True, wants_hidden=True),
    ForwardItem([40], start=0, block_table=[4], wants_logits=True),
]


class RecordingEvent:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self) -> None:
        self.calls.append("record")

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
    on_cpu = BatchStaging(CPU).stage(planned)
    packed = planned.on_device(StagingBuffer(CPU, RecordingEvent()).send(planned.arrays))
    for batch in (on_cpu, packed):
        assert batch.token_ids.tolist() == [20, 40, 10, 11, 12]
        assert batch.positions.tolist() == [8, 0, 2, 3, 4]
        assert batch.logits_indices.tolist() == [0, 4, 1]
        assert batch.hidden_indices.tolist() == [2, 3, 4]
        assert (batch.hidden_lens, batch.num_decode_tokens, batch.num_tokens) == ((3,), 2, 5)
        assert batch.decode is not None
        assert batch.prefill is not None
        assert batch.decode.block_tables.tolist() == [[7, 1, 9], [4, 0, 0]]
        assert (batch.decode.query_lens, batch.decode.kv_lens) == ((1, 1), (9, 1))
        assert batch.prefill.block_tables.tolist() == [[5, 3]]
        assert batch.prefill.seq_lens.tolist() == [5]
        assert (batch.prefill.query_lens, batch.prefill.kv_lens) == ((3,), (5,))


def test_on_a_cpu_nothing_is_copied() -> None:
    planned = plan_batch(ITEMS, 4)
    assert BatchStaging(CPU).stage(planned).token_ids.data_ptr() == planned.token_ids.ctypes.data
