"""Throughput beside that of other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.plots.drawing import INK, OTHER, OURS, as_svg, drawing, footer, grid
from tests.plots.figure_file import FigureFile

BAR = 0.38  # of a row


@dataclass(frozen=True)
class _Row:
    """One workload, both sides on the same prompts."""

    label: str
    ours: Sequence[float]  # generated tokens a second of each trial
    other: Sequence[float]
    ratio: float  # median of our time over the other's

    @classmethod
    def of(cls, file: FigureFile, comparison: Mapping[str, Any]) -> _Row:
        load = comparison["workload"]
        num_tokens = load["num_requests"] * load["max_tokens"]
        ours, other = (_side(file.figures["sides"][side]) for side in ("ours", "other"))
        order = ", prompts sorted for it" if "--sorted" in file.command else ""
        shared = load["prefix_tokens"]
        shape = f"{load['num_requests']} prompts of {shared + load['own_tokens']} tokens, {shared} shared"
        return cls(
            f"{load['model']}, {shape} ({file.commit})\n{ours} | {other}{order}",
            [num_tokens / seconds for seconds in comparison["our_s"]],
            [num_tokens / seconds for seconds in comparison["other_s"]],
            comparison["ratio"],
        )


def _side(about: Mapping[str, str]) -> str:
    engine = about["engine"].split(", torch")[0]
    return ", ".join(filter(None, (engine, about.get("dtype", ""))))


def peers_plot(files: Sequence[FigureFile]) -> str:
    """SVG: a pair of bars (median of the trials, each trial a dot) for each comparison of all files."""
    rows = [_Row.of(file, c) for file in files for c in file.figures["comparisons"] if c["other_s"]]
    with drawing():
        figure = Figure(figsize=(9.5, 1.6 + 0.48 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for place, row in enumerate(rows):
            _draw(axes, place, row)
        axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.3 * max(rate for row in rows for rate in (*row.ours, *row.other)))
        axes.set_xlabel("generated tokens/s, more is better; bars are medians, dots trials; 64 tokens out each")
        figure.suptitle(
            "Throughput on the same prompts: blue is the first name of each row, grey the second",
            x=0.01,
            ha="left",
            fontsize=10,
        )
        grid(axes)
        footer(figure, files)
        return as_svg(figure)


def _draw(axes: Axes, place: int, row: _Row) -> None:
    for offset, rates, colour in ((-BAR / 2, row.ours, OURS), (BAR / 2, row.other, OTHER)):
        axes.barh(place + offset, median(rates), BAR, color=colour)
        axes.plot(rates, [place + offset] * len(rates), "o", color=INK, markersize=2.5)
    end = max(*row.ours, *row.other)
    axes.text(end, place, f"   blue takes {row.ratio:.2f} times as long", va="center", fontsize=8)
