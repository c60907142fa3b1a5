"""Formats the GPU's figures as lines and as JSON, and compares them with the goals for an H200."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tests.benchmarks.gpu.measure import DecodeCell, EngineLoad, Throughput
from tests.benchmarks.gpu.transformers_peer import Parity, PeerFigures
from tests.benchmarks.gpu.workload import FORMULA
from tests.benchmarks.machine import Machine

TRIAL = "tiny shapes, to try the script: no figure is a measurement"
WIDTHS = {"section": 14, "model": 14, "graphs": 7}
DECODE_HEADER = "batch  context  ms a step (range)          tok/s  limit ms  % limit  "
DECODE_HEADER += "replays kernels launches waits to-host allocs idle %"
WORKLOAD_HEADER = "seconds  output tok/s  limit s  % limit  steps  preemptions  cached tokens"

NOT_MEASURED = "not measured"
GOAL_GPU = "H200"
GOAL_BATCH = 64
GOAL_PERCENT = 75.0
GOAL_TOKENS_PER_S = 26_000.0

Figure = Parity | EngineLoad | Throughput | DecodeCell | PeerFigures


def header(section: str) -> str:
    """The heading of a section's lines."""
    columns = {"decode": DECODE_HEADER, **dict.fromkeys(("nano-vllm", "prefill", "shared-prefix"), WORKLOAD_HEADER)}
    return "\n" + _labels(section, "model", "graphs") + columns.get(section, "")


def line(result: GpuResult) -> str:
    """One figure as a line, or why it is missing."""
    graphs = {None: "", True: "on", False: "off"}[result.graphs]
    return _labels(result.section, result.model, graphs) + _text(result)


def goals_table(goals: Sequence[GpuGoal]) -> str:
    """A table of all goals, measured or not."""
    verdicts = {None: "", True: "met", False: "missed"}
    rows = [("goal on an H200", "asked", "found", "")]
    for goal in goals:
        asked = f"{'at least' if goal.at_least else 'at most'} {goal.bound:,.0f} {goal.unit}"
        rows.append((goal.name, asked, goal.text, verdicts[goal.is_met]))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def as_json(machine: Machine | None, results: Sequence[GpuResult], about: dict[str, Any]) -> dict[str, Any]:
    """All figures as plain data. machine: None without a GPU; about: what was asked for and `is_measurement`."""
    goals = find_goals(results, machine.gpu if machine is not None and about["is_measurement"] else None)
    return {
        **about,
        "machine": None if machine is None else asdict(machine),
        "formula": FORMULA,
        "goals": [
            {
                "goal": goal.name,
                "asked": goal.bound,
                "at_least": goal.at_least,
                "unit": goal.unit,
                "value": NOT_MEASURED if goal.value is None else goal.value,
                "is_met": goal.is_met,
            }
            for goal in goals
        ],
        "results": [_record(result) for result in results],
    }


def _labels(*labels: str) -> str:
    return "".join(label.ljust(width) + " " for label, width in zip(labels, WIDTHS.values(), strict=True))


def _text(result: GpuResult) -> str:
    figure = result.figure
    if figure is None:
        return f"failed: {result.error}"
    if isinstance(figure, DecodeCell):
        return _decode(figure)
    if isinstance(figure, Throughput):
        idle = "" if figure.counts is None else f"  idle {figure.counts.idle_percent:.1f} %"
        return (
            f"{figure.seconds:7.2f}  {figure.tokens_per_s:12,.0f}  {figure.limit_s:7.2f}  {figure.percent:7.1f}  "
            f"{figure.num_steps:5}  {figure.num_preemptions:11}  {figure.cached_tokens:13,}{idle}"
        )
    if isinstance(figure, Parity | EngineLoad):
        return str(figure)
    return (
        f"transformers {figure.version}, {figure.attention} attention, greedy: {figure.tokens_per_s:,.0f} tok/s; "
        f"{figure.finished_requests} of {figure.num_requests} requests ended, "
        f"{figure.output_tokens:,} tokens in {figure.seconds:.1f} s"
    )


def _decode(cell: DecodeCell) -> str:
    times = f"{cell.median_ms:.3f} ({min(cell.step_ms):.3f} to {max(cell.step_ms):.3f})"
    counts = cell.counts
    seen = (None,) * 4 if counts is None else (counts.kernels, counts.launches, counts.syncs, counts.copies_to_host)
    idle = None if counts is None else counts.idle_percent
    columns = zip((cell.replays, *seen, cell.allocations, idle), (7, 7, 8, 5, 7, 6, 6), strict=True)
    return (
        f"{cell.batch:5}  {cell.context_tokens:7.0f}  {times:24} {cell.tokens_per_s:7,.0f}  {cell.limit_ms:8.3f}  "
        f"{cell.percent:7.1f}  " + " ".join(_count(value, width) for value, width in columns)
    )


def _count(value: float | None, width: int) -> str:
    """A count a step, right-aligned; - if it was not measured."""
    return f"{'-' if value is None else format(value, '.4g'):>{width}}"


def _record(result: GpuResult) -> dict[str, Any]:
    record: dict[str, Any] = {"section": result.section, "model": result.model, "graphs": result.graphs}
    figure = result.figure
    if figure is None:
        return record | {"error": result.error}
    record |= asdict(figure)
    for name in ("percent", "tokens_per_s", "median_ms", "holds"):
        if hasattr(figure, name):
            record[name] = getattr(figure, name)
    return record


@dataclass(frozen=True)
class GpuGoal:
    """A goal and the figure that was measured for it."""

    name: str
    unit: str
    bound: float
    at_least: bool  # else: at most
    value: float | None
    gpu: str | None  # that it was measured on

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None if it was not measured on the GPU that it is for."""
        if self.value is None or GOAL_GPU not in (self.gpu or ""):
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def text(self) -> str:
        """The value with its unit, or that it was not measured."""
        return NOT_MEASURED if self.value is None else f"{self.value:,.1f} {self.unit}"


def find_goals(results: Sequence[GpuResult], gpu: str | None) -> list[GpuGoal]:
    """All goals with their figures. gpu: None if nothing counts as measured (no GPU, or tiny shapes)."""
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
    """The faster of decode with and without graphs: the engine's default may be either."""
    cells = [r.figure for r in results if r.model == model and isinstance(r.figure, DecodeCell)]
    return max((cell.percent for cell in cells if cell.batch == GOAL_BATCH), default=None)


def _worst(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


@dataclass(frozen=True)
class GpuResult:
    """One figure of a section, or the error in its place."""

    section: str
    model: str
    graphs: bool | None  # whether decode steps were replayed as CUDA graphs; None where that has no meaning
    figure: Figure | None
    error: str = ""

    @property
    def differs(self) -> bool:
        """Whether our tokens differ from transformers'."""
        return isinstance(self.figure, Parity) and not self.figure.holds
