"""Time of work on a GPU, without what the host adds and without what an earlier run left in the cache."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 512 * 2**20  # eight times the L2 of an H200 (60 MB), which it replaces before each run
MIN_RUNS, MAX_RUNS = 10, 100
BUDGET_S = 0.5  # of GPU time for the runs of one measurement
WARM_UP_RUNS = 3  # the first compiles


class GpuTimer:
    """Measures with CUDA events around each run.

    Before each run a buffer is overwritten: that empties the L2, and it keeps the GPU busy for as long as the host
    needs to enqueue the run, so that launch times of the host are not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._flush_buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._flush_s = 0.0
        self._flush_s = self.median_us(self._flush_buffer.zero_) / 1e6

    def median_us(self, run: Callable[[], object], restore: Callable[[], None] | None = None) -> float:
        """Median of many runs, in microseconds; restore goes before each run, outside the time."""
        host_s, total_s = 0.0, 0.0
        for _ in range(WARM_UP_RUNS):
            _call(restore)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            host_s = time.perf_counter() - begin
            torch.cuda.synchronize()
            total_s = time.perf_counter() - begin
        # A run that waits for the GPU on the host cannot be hidden, so no more than 20 passes are tried.
        passes = min(1 + math.ceil(1.5 * host_s / self._flush_s), 20) if self._flush_s else 1
        num_runs = min(max(int(BUDGET_S / max(total_s, 1e-6)), MIN_RUNS), MAX_RUNS)
        events = [(_event(), _event()) for _ in range(num_runs)]
        for start, end in events:
            _call(restore)
            for _ in range(passes):
                self._flush_buffer.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(float(start.elapsed_time(end)) for start, end in events) * 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here


def _call(action: Callable[[], None] | None) -> None:
    if action is not None:
        action()
