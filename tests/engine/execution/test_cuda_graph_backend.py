"""What is asked of torch.cuda, and in which order, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.errors import EngineFatal
from engine.execution.decode_graphs import CudaGraphBackend

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


def test_a_run_before_the_capture_and_one_in_it_both_on_the_side_stream_then_replays_alone(cuda: FakeCuda) -> None:
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


def test_all_captures_share_a_pool_until_one_fails_and_leaves_its_pool_open(cuda: FakeCuda) -> None:
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
