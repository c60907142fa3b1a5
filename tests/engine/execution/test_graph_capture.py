"""Which decode graphs the settings ask for, and what capturing them asks of torch.cuda, without a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import EngineFatal
from engine.execution import decode_graphs as module
from engine.execution.decode_graphs import (
    CudaGraphBackend,
    DecodeGraphs,
    DecodeRun,
    chunk_graph_sizes,
    decode_graph_sizes,
    graph_kinds,
    make_decode_graphs,
)
from settings import CudaGraphSettings, EngineSettings
from tests.support.engines import StaticRunner, load_engine

DEVICE = torch.device("cuda")


class FakeCuda:
    """The parts of torch.cuda that capture needs; every call is written down with the stream it was made on."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream = "main"
        self.num_pools = 0
        self.ending_fails = False
        self.is_lost = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replaced = {
            "Stream": lambda _: FakeStream(self, "side"),
            "current_stream": lambda _: FakeStream(self, self.stream),
            "set_stream": lambda stream: setattr(self, "stream", stream.name),
            "stream": self._on,
            "graph_pool_handle": self._new_pool,
            "CUDAGraph": lambda: FakeGraph(self),
            "graph": self._capturing,
            "synchronize": self._synchronize,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def note(self, call: str) -> None:
        self.calls.append(f"{self.stream}: {call}")

    def _synchronize(self, _: torch.device) -> None:
        if self.is_lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def _new_pool(self) -> int:
        self.num_pools += 1
        return self.num_pools

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def _capturing(self, graph: FakeGraph, *, pool: int, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        self.note(f"begin {graph.name}, pool {pool}, {capture_error_mode}")
        try:
            yield
        finally:
            self.note("end")
            if self.ending_fails:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self.stream = before


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.note(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.name = "graph"

    def replay(self) -> None:
        self._cuda.note("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_a_graph_is_run_and_captured_on_the_side_stream_then_replayed(cuda: FakeCuda) -> None:
    replay = CudaGraphBackend(DEVICE).capture(lambda kv_lens: cuda.note(f"run {kv_lens}"), (64, 64))
    assert cuda.calls == [
        "main: side waits for main",
        "side: run (64, 64)",
        "side: begin graph, pool 1, thread_local",
        "side: run (64, 64)",
        "side: end",
        "main: main waits for side",
    ]
    cuda.calls.clear()
    replay((9, 1))
    replay((10, 1))
    assert cuda.calls == ["main: replay"] * 2


def test_what_follows_a_graph_is_captured_as_one_in_the_same_pool(cuda: FakeCuda) -> None:
    backend = CudaGraphBackend(DEVICE)
    backend.capture(lambda _: None, (64,))
    cuda.calls.clear()
    replay = backend.capture_after(lambda: cuda.note("copy"))
    assert [call for call in cuda.calls if "wait" not in call] == [
        "side: copy",
        "side: begin graph, pool 1, thread_local",
        "side: copy",
        "side: end",
    ]
    cuda.calls.clear()
    replay()
    assert cuda.calls == ["main: replay"]


def test_captures_share_a_pool_until_one_fails_and_leaves_its_pool_open(cuda: FakeCuda) -> None:
    backend = CudaGraphBackend(DEVICE)

    def refuse(_: Any) -> None:
        raise RuntimeError("out of memory")

    for run in (lambda _: None, lambda _: None):
        backend.capture(run, (1,))
    with pytest.raises(RuntimeError, match="out of memory"):
        backend.capture(refuse, (1,))
    cuda.ending_fails = True
    with pytest.raises(RuntimeError, match="previous error"):
        backend.capture(lambda _: None, (1,))
    assert cuda.stream == "main"
    cuda.ending_fails = False
    backend.capture(lambda _: None, (1,))
    pools = [call.split("pool ")[1][0] for call in cuda.calls if "begin" in call]
    assert pools == ["1", "1", "2", "3"]


def test_a_fault_of_the_device_is_no_capture_that_failed(cuda: FakeCuda) -> None:
    cuda.ending_fails = cuda.is_lost = True
    with pytest.raises(EngineFatal, match="illegal memory access"):
        CudaGraphBackend(DEVICE).capture(lambda _: None, (1,))
    assert cuda.stream == "main"


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)),
    ],
)
def test_steps_widen_and_the_last_size_holds_every_sequence(max_num_seqs: int, expected: tuple[int, ...]) -> None:
    assert decode_graph_sizes(max_num_seqs) == expected


def test_beyond_512_rows_nothing_is_captured() -> None:
    sizes = decode_graph_sizes(65_536)
    assert sizes[-10:] == (240, 256, 288, 320, 352, 384, 416, 448, 480, 512)
    assert sizes == decode_graph_sizes(512)
    assert len(sizes) == 31
    rows = range(9, 513)
    assert max((min(size for size in sizes if size >= m) - m) / m for m in rows) < 0.8


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(0, ()), (255, ()), (256, (256,)), (400, (256, 384, 400)), (2048, (256, 384, 512, 768, 1024, 1536, 2048))],
)
def test_numbers_of_tokens_in_chunks_grow_by_half_octaves(max_tokens: int, expected: tuple[int, ...]) -> None:
    assert chunk_graph_sizes(max_tokens) == expected


def test_graphs_with_chunks_have_few_numbers_of_rows() -> None:
    kinds = graph_kinds(decode_graph_sizes(300), 40_960, (256, 2048))
    with_chunks = [kind for kind in kinds if kind.chunk_tokens]
    assert [kind[:2] for kind in with_chunks] == [
        (tokens, rows) for tokens in (256, 2048) for rows in (16, 64, 256, 300)
    ]
    assert {kind.row_tokens for kind in with_chunks} == {40_960}
    assert [kind.max_chunks for kind in with_chunks] == [4] * 4 + [32] * 4
    assert all(len(kind.lens) == kind.num_rows + 2 * (kind.max_chunks + 1) for kind in with_chunks)


def test_the_sizes_are_those_set_or_the_usual_ones_and_off_means_none(
    moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = load_engine(moe_checkpoint).parts.executor
    model, kv_cache = executor.model, executor.kv_cache

    def sizes(**options: object) -> list[int] | None:
        backend = StaticRunner()
        monkeypatch.setattr(module, "CudaGraphBackend", lambda _: backend)
        options = {"chunk_tokens": 0, **options}
        settings = EngineSettings(max_num_seqs=4, cuda_graphs=CudaGraphSettings.model_validate(options))
        graphs = make_decode_graphs(model, kv_cache, settings, 64)
        if graphs is None:
            return None
        graphs.capture_all()
        return [len(bounds) for bounds in backend.captures]

    assert sizes(enabled=True) == [4, 2, 1]
    assert sizes(enabled=True, batch_sizes="1,3") == [3, 1]
    assert sizes(enabled=False, batch_sizes="1,3") is None
    assert sizes() is None
    model = replace(model, lm_head=None)
    assert sizes(enabled=True) is None


def test_no_garbage_is_collected_while_graphs_are_captured(moe_checkpoint: Path) -> None:
    executor = load_engine(moe_checkpoint).parts.executor
    seen: list[bool] = []

    class Watching(StaticRunner):
        def capture(self, run: DecodeRun, kv_len_bounds: tuple[int, ...]) -> DecodeRun:
            seen.append(gc.isenabled())
            assert garbage() is None  # it was collected before
            return super().capture(run, kv_len_bounds)

    ring: list[object] = []
    ring.append(Watching())
    ring.append(ring)
    garbage = weakref.ref(ring[0])
    del ring
    DecodeGraphs(executor.model, executor.kv_cache, Watching(failing=(2,)), (1, 2, 4), 64).capture_all()
    assert seen == [False] * 3
    assert gc.isenabled()


def test_on_a_cpu_none_are_made(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    assert engine.settings.engine.cuda_graphs.enabled is False
    assert engine.model_interface.status().decode_graphs is None
    assert not engine.model_interface.capabilities().cuda_graphs
