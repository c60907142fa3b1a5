"""The scaling figures as one plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.benchmarks.scaling.scaling_point import ScalingPoint
from tests.benchmarks.scaling.svg_plot import Panel, svg
from tests.benchmarks.scaling.waiting_memory import WaitingMemory


def plot(axes: Mapping[str, Sequence[ScalingPoint]], memories: Sequence[WaitingMemory]) -> str:
    """SVG: time per token of each axis beside what its arithmetic would take at the first size's rate, and memory."""
    panels = [Panel(name, "us per token", _time_lines(points)) for name, points in axes.items()]
    processes = dict.fromkeys(memory.process for memory in memories)
    lines = {
        process: [(memory.num_waiting, memory.peak_bytes / 1e6) for memory in memories if memory.process == process]
        for process in processes
    }
    return svg([*panels, Panel("requests waiting", "resident at most, MB", lines)])


def _time_lines(points: Sequence[ScalingPoint]) -> dict[str, list[tuple[float, float]]]:
    us_per_flop = points[0].us_per_token / points[0].flop_per_token
    return {
        "measured": [(point.size, point.us_per_token) for point in points],
        "arithmetic, at the first size's rate": [(point.size, point.flop_per_token * us_per_flop) for point in points],
    }
