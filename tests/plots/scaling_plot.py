"""Cost against size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from tests.benchmarks.scaling.axis import OWN_TOKENS
from tests.plots.drawing import BOUND, OTHER, OURS, as_svg, drawing, footer, grid
from tests.plots.figure_file import FigureFile

Points = Sequence[Mapping[str, Any]]


def scaling_plot(file: FigureFile) -> str:
    """SVG: time a token of each axis beside what its arithmetic would take at the first size's rate, and memory."""
    panels = {name: list(points) for name, points in groupby(file.figures["points"], lambda point: point["axis"])}
    panels.pop(OWN_TOKENS, None)  # has a plot of its own
    memories = file.figures["memories"]
    with drawing():
        figure = Figure(figsize=(9, 2.9), layout="constrained")
        *rows, last = figure.subplots(1, len(panels) + 1)
        for axes, (name, points) in zip(rows, panels.items(), strict=True):
            _draw_time(axes, name, points)
        rows[0].set_ylabel("us a token")
        rows[0].legend(fontsize=7)
        _draw_memory(last, memories)
        figure.suptitle("Cost against size: flat is linear (4 layers of width 256, float32)", x=0.01, ha="left")
        footer(figure, [file])
        return as_svg(figure)


def _draw_time(axes: Axes, name: str, points: Points) -> None:
    sizes = [point["size"] for point in points]
    per_token = [point["us_per_token"] for point in points]
    flop = [point["flop"] / point["num_tokens"] for point in points]
    axes.loglog(sizes, per_token, color=OURS, label="measured")
    bound = [per_token[0] * each / flop[0] for each in flop]
    axes.loglog(sizes, bound, color=BOUND, linestyle="--", label="arithmetic alone")
    middle = (min(per_token) * max(per_token)) ** 0.5
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set_ylim(middle / 4, middle * 4)  # a factor of 16, so that noise does not look like a slope
    _finish(axes, name, sizes)


def _draw_memory(axes: Axes, memories: Points) -> None:
    for colour, (process, rows) in zip((OURS, OTHER), groupby(memories, lambda row: row["process"]), strict=True):
        looks = list(rows)
        counts = [row["num_waiting"] for row in looks]
        axes.semilogx(counts, [row["peak_bytes"] / 1e6 for row in looks], color=colour, label=process)
    axes.set_ylim(0)
    axes.set_title("resident memory at most, MB", fontsize=9)
    axes.legend(fontsize=7)
    _finish(axes, "requests waiting", counts)


def _finish(axes: Axes, name: str, sizes: Sequence[int]) -> None:
    axes.set_xlabel(name)
    axes.set_xticks(sizes, [f"{size // 1000}k" if size >= 1000 and size % 1000 == 0 else str(size) for size in sizes])
    axes.tick_params(labelsize=7)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    grid(axes)
