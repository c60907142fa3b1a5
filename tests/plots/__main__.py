"""Draws the committed figures, tests/benchmarks/results/*.json, as SVG files beside them: `python -m tests.plots`.

The plots are read on light and on dark pages.
"""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from tests.benchmarks.scaling.measure import OWN_TOKENS

OURS, OTHER, BOUND = "#2f81f7", "#8b949e", "#d29922"  # 3:1 and more on white and on GitHub's dark page
# Stands for the page's own text colour, which matplotlib has no word for.
INK = "#010203"
_STYLE = (
    "<style>svg{color:#1f2328}svg text{font-family:system-ui,sans-serif}"
    "@media (prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
)

BAR = 0.38  # of a row

Points = Sequence[Mapping[str, Any]]

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


@dataclass(frozen=True)
class FigureFile:
    """A file of figures, as `write_figures` wrote it."""

    name: str  # of the file, without suffix
    figures: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises OSError, ValueError."""
        return cls(path.stem, json.loads(path.read_text()))

    @property
    def machine(self) -> str:
        """The processor and the version of PyTorch."""
        machine = self.figures["machine"]
        cpu = " ".join(machine["cpu"].replace("(R)", "").replace("Processor", "").split())
        return f"{cpu}, {machine['num_cpus']} CPUs, torch {machine['torch']}"

    @property
    def commit(self) -> str:
        """The first seven digits of the commit."""
        return str(self.figures["machine"]["checkout"]["commit"])[:7]

    @property
    def origin(self) -> str:
        """Commit, day, how busy the machine was, and the command."""
        machine, checkout = self.figures["machine"], self.figures["machine"]["checkout"]
        changes = " with changes" if checkout["dirty"] else ""
        when = f"{self.commit}{changes}, {self.figures['date']}, load before {machine['load']:.1f}"
        return f"{when}: {self.command}"

    @property
    def command(self) -> str:
        """The command, without paths of the machine it ran on."""
        words = shlex.split(self.figures["command"])
        hidden = {"--json", "--cache"}
        kept = [word for before, word in pairwise(("", *words)) if not {before, word} & hidden]
        return shlex.join("DIR" if word.startswith("/") else word for word in kept)


@contextmanager
def drawing() -> Iterator[None]:
    """Give figures that are made in the block the look of all."""
    style = mpl.rc_context(
        {
            "svg.fonttype": "none",  # text stays text: sharp, searchable, in the page's colour
            "svg.hashsalt": "millrace",  # the same figures give the same file
            "font.size": 9,
            "text.color": INK,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "xtick.color": INK,
            "ytick.color": INK,
            "legend.frameon": False,
            "lines.marker": "o",
            "lines.markersize": 4,
        }
    )
    with style:
        yield


def footer(figure: Figure, files: Sequence[FigureFile]) -> None:
    """Where the figures come from, below the plot."""
    lines = (*dict.fromkeys(file.machine for file in files), *(file.origin for file in files))
    figure.supxlabel("\n".join(lines), fontsize=6.5, x=0.01, ha="left")


def grid(axes: Axes) -> None:
    """Faint lines at the ticks of both axes."""
    axes.grid(color=OTHER, alpha=0.3, linewidth=0.5)
    axes.set_axisbelow(True)


def as_svg(figure: Figure) -> str:
    """The SVG document, without what differs from day to day."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    head, tag, rest = out.getvalue().replace(INK, "currentColor").partition("<defs>")
    return f"{head}{_STYLE}{tag}{rest}"


@dataclass(frozen=True)
class _Row:
    """A workload with both sides on the same prompts."""

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


def sharing_plot(file: FigureFile) -> str:
    """SVG: seconds of the same requests, the more they share the fewer; and what arithmetic alone would leave."""
    points = [point for point in file.figures["points"] if point["axis"] == OWN_TOKENS]
    whole = max(points, key=lambda point: point["size"])  # nothing shared
    shares = [100 * (1 - point["size"] / whole["size"]) for point in points]
    seconds = [point["seconds"] for point in points]
    bound = [whole["seconds"] * point["flop"] / whole["flop"] for point in points]
    with drawing():
        figure = Figure(figsize=(6, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(shares, seconds, color=OURS, label="measured")
        axes.plot(shares, bound, color=BOUND, linestyle="--", label="arithmetic alone, at the rate without sharing")
        for share, each in zip(shares, seconds, strict=True):
            axes.annotate(f"{each:.2f}", (share, each), textcoords="offset points", xytext=(4, 5), fontsize=7)
        axes.set_ylim(0)
        axes.set_xlabel("% of each prompt that all 64 begin with")
        axes.set_ylabel("s for 64 requests of 512 + 16 tokens")
        axes.set_title("Cost against sharing (4 layers of width 256, float32)", loc="left")
        axes.legend(fontsize=7)
        grid(axes)
        footer(figure, [file])
        return as_svg(figure)


def plots(results: Path) -> Iterator[tuple[str, str]]:
    """Name and content of every plot of the figures in a directory. Raises OSError, ValueError for what is no file."""
    scaling, sharing = (FigureFile.read(results / f"{name}.json") for name in ("scaling", "sharing"))
    peers = [FigureFile.read(path) for path in sorted(results.glob("peers_*.json"))]
    yield "peers.svg", peers_plot(peers)
    yield "scaling.svg", scaling_plot(scaling)
    yield "sharing.svg", sharing_plot(sharing)


def main() -> int:
    """Write the plots. Returns 0."""
    for name, content in plots(RESULTS):
        (RESULTS / name).write_text(content)
        print(RESULTS / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
