"""A Chrome trace of some forward passes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class PassTrace:
    """Profiles forward passes and writes each into `file` once it has run: memory holds one pass at a time.

    A pass of 8 sequences is 400 events and 70 KB a dense layer on a CPU, up to 1,200 and 200 KB with experts and
    deterministic kernels. The file is one JSON object of the trace event format (chrome://tracing, ui.perfetto.dev),
    complete once it is closed. What goes wrong with the file is kept for `close`: a full disk ends the trace, not the
    run.
    """

    def __init__(self, file: BinaryIO, max_passes: int) -> None:
        self._file = file
        self._max_passes = max_passes
        self._num_passes = 0
        self._error: Exception | None = None

    @property
    def has_room(self) -> bool:
        """Whether another pass may be recorded."""
        return self._error is None and self._num_passes < self._max_passes

    @contextmanager
    def record(self, name: str, device: torch.device) -> Iterator[None]:
        """Record what runs inside under `name`: CPU operations and, on CUDA, kernels, which are waited for."""
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler, record_function(name):
            yield
        try:
            self._append(profiler)
        except (OSError, ValueError) as error:  # ValueError: torch found no room for all of it
            self._error = error

    def close(self) -> None:
        """Write the end of the file. Raises OSError, also for what went wrong before."""
        if self._error is not None:
            raise OSError(str(self._error)) from self._error
        self._file.write(b"\n]}\n" if self._num_passes else b'{"traceEvents": []}\n')
        self._file.flush()

    def _append(self, profiler: profile) -> None:
        trace = _exported(profiler)
        events = [_encoded(event) for event in trace.pop("traceEvents")]
        del trace["traceName"]  # of the file it was exported to
        # The first pass gives the rest too: devices and the base of all times.
        before = b",\n" if self._num_passes else _encoded(trace)[:-1] + b',"traceEvents":[\n'
        self._file.write(before + b",\n".join(events))
        self._file.flush()
        self._num_passes += 1


def _exported(profiler: profile) -> dict[str, Any]:
    """The profiler's trace; it writes to a path only."""
    with tempfile.TemporaryDirectory(prefix="millrace-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_bytes())
    return trace


def _encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
