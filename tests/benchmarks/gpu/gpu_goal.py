"""What an H200 is to reach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from tests.benchmarks.gpu.decode_cell import DecodeCell
from tests.benchmarks.gpu.gpu_result import GpuResult
from tests.benchmarks.gpu.throughput import Throughput

NOT_MEASURED = "not measured"
GOAL_GPU = "H200"
GOAL_BATCH = 64
GOAL_PERCENT = 75.0
GOAL_TOKENS_PER_S = 26_000.0


@dataclass(frozen=True)
class GpuGoal:
    """A goal and what was found."""

    name: str
    unit: str
    bound: float
    at_least: bool  # else: at most
    value: float | None
    gpu: str | None  # that it was measured on

    @property
    def is_met(self) -> bool | None:
        """None: not measured, or not on the GPU that the goal is for."""
        if self.value is None or GOAL_GPU not in (self.gpu or ""):
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def text(self) -> str:
        """The value with its unit, or that it was not measured."""
        return NOT_MEASURED if self.value is None else f"{self.value:,.1f} {self.unit}"


def find_goals(results: Sequence[GpuResult], gpu: str | None) -> list[GpuGoal]:
    """Every goal. gpu: None where nothing counts as measured: without one, or of tiny shapes."""
    found = list(results) if gpu is not None else []
    steps = [r.figure for r in found if r.graphs and isinstance(r.figure, DecodeCell)]
    syncs = [cell.counts.syncs for cell in steps if cell.counts is not None]
    allocations = [cell.allocations for cell in steps if cell.allocations is not None]
    speeds = [
        r.figure.tokens_per_s
        for r in found
        if r.section == "nano-vllm" and r.model == "Qwen3-0.6B" and isinstance(r.figure, Throughput)
    ]
    decode = f"decode at batch {GOAL_BATCH}"
    return [
        *(
            GpuGoal(f"{model}, {decode}", "% of the limit", GOAL_PERCENT, True, _percent(found, model), gpu)
            for model in ("Qwen3-8B", "Qwen3-30B-A3B")
        ),
        GpuGoal("Qwen3-0.6B, nano-vllm workload", "output tok/s", GOAL_TOKENS_PER_S, True, _median(speeds), gpu),
        GpuGoal("allocations in a decode step, any model and batch", "a step", 0.0, False, _worst(allocations), gpu),
        GpuGoal("host waits in a decode step, any model and batch", "a step", 1.0, False, _worst(syncs), gpu),
    ]


def _percent(results: Iterable[GpuResult], model: str) -> float | None:
    """With graphs or without, whichever is faster: the engine's default may be either."""
    cells = [r.figure for r in results if r.model == model and isinstance(r.figure, DecodeCell)]
    return max((cell.percent for cell in cells if cell.batch == GOAL_BATCH), default=None)


def _worst(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
