"""Times and traces the forward passes that engine.profile selects."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import structlog
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.models.decoder import LayerObserver
from settings import EngineSettings

_log = structlog.get_logger(__name__)
R = TypeVar("R")


class ObservedPasses:
    """Runs forward passes, counts them, and times and traces those that engine.profile selects."""

    def __init__(
        self, num_layers: int, device: torch.device, settings: EngineSettings, pass_trace: PassTrace | None
    ) -> None:
        self._num_layers = num_layers
        self._device = device
        self._settings = settings
        self._pass_trace = pass_trace
        self.num_passes = 0

    def run(self, forward: Callable[[LayerObserver | None], R], *, num_tokens: int, num_seqs: int) -> R:
        """What `forward` returns. It is given the observer to tell about its layers, if there is one."""
        if self._settings.profile.selects(self.num_passes, num_tokens, num_seqs):
            result = self._profiled(forward, num_tokens, num_seqs)
        else:
            result = forward(None)
        self.num_passes += 1
        return result

    def _profiled(self, forward: Callable[[LayerObserver | None], R], num_tokens: int, num_seqs: int) -> R:
        trace = self._pass_trace if self._pass_trace is not None and self._pass_trace.has_room else None
        name = f"forward pass {self.num_passes} (num_tokens={num_tokens}, num_seqs={num_seqs})"
        with nullcontext() if trace is None else trace.record(name, self._device):
            timer = LayerTimer(self._device) if self._settings.profile.layers else None
            observer = timer if trace is None else LayerRanges(self._num_layers, timer)
            result = forward(observer)
        if timer is not None:
            _log.info(
                "layer_profile",
                forward_pass=self.num_passes,
                num_tokens=num_tokens,
                num_seqs=num_seqs,
                stages_ms={str(stage): round(ms, 3) for stage, ms in timer.stages_ms.items()},
            )
        return result


class PassTrace:
    """Profiles forward passes and writes each into `file` once it has run: memory holds one pass at a time.

    On a CPU a pass of 8 sequences is 400 events and 70 KB a dense layer, up to 1,200 and 200 KB with experts and
    deterministic kernels. The file is one JSON object of the trace event format (chrome://tracing, ui.perfetto.dev),
    complete once it is closed. `close` raises what went wrong with the file: a full disk ends the trace, not the run.
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
        # acc_events: else torch 2.11 warns of cycles that begin anew, of which there is one.
        with profile(activities=activities, acc_events=True) as profiler, record_function(name):
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
        # What is not events comes from the first pass: devices, and the base of all times.
        before = b",\n" if self._num_passes else _encoded(trace)[:-1] + b',"traceEvents":[\n'
        self._file.write(before + b",\n".join(events))
        self._file.flush()
        self._num_passes += 1


def _exported(profiler: profile) -> dict[str, Any]:
    """The profiler's trace, by way of a file: it writes nowhere else."""
    with tempfile.TemporaryDirectory(prefix="millrace-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_bytes())
    return trace


def _encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


class LayerTimer:
    """A LayerObserver that waits for the device after each stage: exact, and slower. For selected steps only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_s = self._now_s()
        self.stages_ms: dict[int, float] = {}  # -1: embedding, then the layers, then the logits

    def after(self, index: int) -> None:
        """Note the time since the stage before."""
        now_s = self._now_s()
        self.stages_ms[index] = (now_s - self._last_s) * 1e3
        self._last_s = now_s

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class LayerRanges:
    """A LayerObserver that puts each stage into a range of the trace: "embedding", "layer 0" and on, "logits".

    The first begins when this is made. `inner`, if there is one, is told inside the range, which includes its waiting.
    """

    def __init__(self, num_layers: int, inner: LayerObserver | None) -> None:
        self._num_layers = num_layers
        self._inner = inner
        self._range = ExitStack()  # holds the one that is open
        self._range.enter_context(record_function("embedding"))

    def after(self, index: int) -> None:
        """End the stage, begin the next."""
        if self._inner is not None:
            self._inner.after(index)
        self._range.close()
        if index < self._num_layers:
            name = "logits" if index + 1 == self._num_layers else f"layer {index + 1}"
            self._range.enter_context(record_function(name))
