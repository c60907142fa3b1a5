"""Capture as CUDA graphs."""

from __future__ import annotations

import torch

from engine.errors import EngineFatal
from engine.execution.graph_backend import DecodeRun


class CudaGraphBackend:
    """Captures on a stream of its own, all graphs in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: DecodeRun, kv_len_bounds: tuple[int, ...]) -> DecodeRun:
        """See `GraphBackend.capture`.

        The run before the capture compiles and loads kernels, which a capture forbids, and has cuBLAS take the
        workspace of this stream, which the graph then points to and which torch keeps to the end of the process.
        Raises EngineFatal where not the capture but the device failed.
        """
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run(kv_len_bounds)
            # thread_local: what other threads do with the GPU meanwhile, such as pinning memory, is theirs.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run(kv_len_bounds)
        except BaseException:
            # Where ending the capture fails, torch leaves the stream current and the pool as one that is recorded to.
            torch.cuda.set_stream(current)
            self._pool = torch.cuda.graph_pool_handle()
            self._require_device()
            raise
        current.wait_stream(self._stream)
        return lambda _: graph.replay()

    def _require_device(self) -> None:
        """A fault of the device stays and shows in every later call; a capture that was refused leaves none. Waits for
        what the side stream still runs, too.
        """
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as fault:
            raise EngineFatal(f"the device failed while a decode step was captured: {fault}") from fault
