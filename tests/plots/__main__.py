"""Draws the committed figures, tests/benchmarks/results/*.json, as SVG files beside them: `python -m tests.plots`.

The plots are read on light and on dark pages.
"""

from __future__ import annotations

import io
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, ScalarFormatter

from tests.benchmarks.scaling.measure import OWN_TOKENS

OURS, OTHER, BOUND = "#2f81f7", "#8b949e", "#d29922"  # 3:1 and more on white and on GitHub's dark page
# Stands for the page's own text colour, which matplotlib has no word for.
INK = "#010203"
_STYLE = (
    "<style>svg{color:#1f2328}svg text{font-family:system-ui,sans-serif}"
    "@media (prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
)

# Eight comparisons at most, to be seen at a glance: file of figures, workload. The others are in FIGURES.md.
SHOWN = (
    ("peers_vllm_bf16", "dense-shared"),
    ("peers_vllm_bf16_unshared", "dense-unshared"),
    ("peers_vllm_bf16_moe", "moe-shared"),
    ("peers_vllm_bf16_moe_unshared", "moe-unshared"),
    ("peers_vllm_quiet", "dense-shared"),
    ("peers_vllm_quiet", "moe-shared"),
    ("peers_openvino", "dense-shared"),
    ("peers_transformers", "dense-shared"),
)
MODELS = {"dense": "dense, 159 M", "moe": "MoE, 190 M"}
OUR_NAME = "Millrace"

# What makes a line bend, or why it does not: by the axis it is over.
BENDS = {
    "requests": "Falls to 64, the most that run at a time: fewer share what a step costs in any case. Flat from there.",
    "prompt tokens": "Rises with its arithmetic: each token attends to all before it, which at 4,096 is more work than "
    "the layers' products.",
    "output tokens": "Rises: a decode step takes 32 tokens, a prefill step up to 2,048, so that a token of an answer "
    "costs more than one of a prompt; the longer the answers, the more of all tokens are theirs.",
    "requests waiting": "Nearly flat: what waits lies in the file or in Redis.",
    OWN_TOKENS: "Nearly straight, along its arithmetic: what all share is computed and kept once. Where nearly all is "
    "shared, most of what is left is decoding, whose tokens cost more than a prompt's.",
}

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
    def origin(self) -> str:
        """Processor, version of PyTorch, day."""
        return f"{self.machine}, {self.figures['date']}"

    def comparison(self, workload: str) -> Mapping[str, Any]:
        """The comparison of a workload. Raises LookupError."""
        found = [each for each in self.figures["comparisons"] if each["workload"]["name"] == workload]
        if not found:
            raise LookupError(f"{self.name}: nothing of {workload}")
        return dict(found[0])


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


def footer(figure: Figure, *lines: str) -> None:
    """What was measured and where, below the plot."""
    figure.supxlabel("\n".join(dict.fromkeys(lines)), fontsize=6.5, x=0.01, ha="left")


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
class Bar:
    """How fast one workload is here, in times the other program's speed."""

    label: str
    other: str  # the other program's name
    speed: float  # of the medians; above 1 ours is faster
    trials: Sequence[float]

    @classmethod
    def of(cls, file: FigureFile, workload: str) -> Bar:
        """The bar of a comparison. Raises LookupError where the file has none of the workload."""
        comparison, sides = file.comparison(workload), file.figures["sides"]
        load, other = comparison["workload"], sides["other"]["engine"].split(",")[0]
        shared = f"{load['prefix_tokens']} tokens shared" if load["prefix_tokens"] else "nothing shared"
        types = f"{other} in {_dtype(sides['other'])}, {OUR_NAME} in {_dtype(sides['ours'])}"
        name = re.sub(r" [\d.]+$", "", other)
        trials = [1 / ratio for ratio in comparison["ratios"]]
        return cls(f"{MODELS[load['model']]}, {shared}\n{types}", name, 1 / comparison["ratio"], trials)

    @property
    def words(self) -> str:
        """Who is faster, and how much."""
        name, times = (OUR_NAME, self.speed) if self.speed >= 1 else (self.other, 1 / self.speed)
        digits = 1 if times >= 1.2 else 2
        return f"{name} {times:.{digits}f} times faster"


def _dtype(side: Mapping[str, str]) -> str:
    return {"f32": "float32"}.get(side["dtype"], side["dtype"])


def peers_plot(files: Mapping[str, FigureFile]) -> str:
    """SVG: a bar for each comparison of SHOWN (median of the trials, each trial a dot). `files`: by name."""
    bars = [Bar.of(files[name], workload) for name, workload in SHOWN]
    drawn = [files[name] for name, _ in SHOWN]
    with drawing():
        figure = Figure(figsize=(8, 4.4), layout="constrained")
        axes = figure.subplots()
        for place, bar in enumerate(bars):
            _draw(axes, place, bar)
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(0.4, 18)
        axes.set_xticks([0.5, 1, 2, 4], ["half as fast", "as fast", "2 times", "4 times"], fontsize=7)
        axes.xaxis.set_minor_locator(NullLocator())
        title = f"Speed of {OUR_NAME} beside other programs, on the same prompts and the same machine"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        axes.axvline(1, color=INK, linewidth=0.8, marker="")
        grid(axes)
        load = drawn[0].comparison(SHOWN[0][1])["workload"]
        prompt = load["prefix_tokens"] + load["own_tokens"]
        shape = f"{load['num_requests']} prompts of {prompt} tokens, {load['max_tokens']} out each"
        about = f"Bars are medians, dots the trials, {shape}; ranges and commands: FIGURES.md"
        footer(figure, about, *(file.origin for file in drawn))
        return as_svg(figure)


def _draw(axes: Axes, place: int, bar: Bar) -> None:
    axes.barh(place, bar.speed - 1, 0.62, left=1, color=OURS if bar.speed >= 1 else OTHER)
    axes.plot(bar.trials, [place] * len(bar.trials), "o", color=INK, markersize=2.5)
    axes.annotate(
        bar.words,
        (max(1, bar.speed, *bar.trials), place),
        textcoords="offset points",
        xytext=(6, 0),
        va="center",
        fontsize=8,
    )


def scaling_plot(file: FigureFile, memory: FigureFile) -> str:
    """SVG: processor time a token of each axis, what its arithmetic would take at the first size's rate; memory."""
    panels = {name: list(points) for name, points in groupby(file.figures["points"], lambda point: point["axis"])}
    panels.pop(OWN_TOKENS, None)  # has a plot of its own
    with drawing():
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        *rows, last = figure.subplots(1, len(panels) + 1)
        for axes, (name, points) in zip(rows, panels.items(), strict=True):
            _draw_time(axes, name, points)
        rows[0].set_ylabel("us of one core a token")
        rows[0].legend(fontsize=7)
        _draw_memory(last, memory.figures["memories"])
        figure.suptitle("Cost against size: flat is linear (4 layers of width 256, float32)", x=0.01, ha="left")
        footer(figure, file.origin, f"memory: {memory.origin}")
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
    axes.set_ylim(0, 1.2 * max(row["peak_bytes"] for row in memories) / 1e6)
    axes.set_ylabel("MB of memory at most")
    axes.legend(fontsize=7)
    _finish(axes, "requests waiting", counts)


def explain(axes: Axes, label: str, name: str, width: int) -> None:
    """Label the x axis, and below it say in a sentence what bends the line; `width` in characters."""
    axes.set_xlabel(f"{label}\n\n{textwrap.fill(BENDS[name], width)}", fontsize=7, loc="left")


def _finish(axes: Axes, name: str, sizes: Sequence[int]) -> None:
    explain(axes, name, name, 36)
    axes.set_xticks(sizes, [f"{size // 1000}k" if size >= 1000 and size % 1000 == 0 else str(size) for size in sizes])
    axes.tick_params(labelsize=7)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    grid(axes)


def sharing_plot(file: FigureFile) -> str:
    """SVG: processor time of the same requests the more they share, and what arithmetic alone would leave."""
    points = [point for point in file.figures["points"] if point["axis"] == OWN_TOKENS]
    whole = max(points, key=lambda point: point["size"])  # nothing shared
    shares = [100 * (1 - point["size"] / whole["size"]) for point in points]
    seconds = [point["seconds"] for point in points]
    bound = [whole["seconds"] * point["flop"] / whole["flop"] for point in points]
    with drawing():
        figure = Figure(figsize=(6, 3.8), layout="constrained")
        axes = figure.subplots()
        axes.plot(shares, seconds, color=OURS, label="measured")
        axes.plot(shares, bound, color=BOUND, linestyle="--", label="arithmetic alone, at the rate without sharing")
        for share, each in zip(shares, seconds, strict=True):
            axes.annotate(f"{each:.2f}", (share, each), textcoords="offset points", xytext=(4, 5), fontsize=7)
        axes.set_ylim(0)
        explain(axes, "% of each prompt that all 64 begin with", OWN_TOKENS, 100)
        axes.set_ylabel("s of one core for 64 requests of 512 + 16 tokens", fontsize=8)
        axes.set_title("Cost against sharing (4 layers of width 256, float32)", loc="left")
        axes.legend(fontsize=7)
        grid(axes)
        footer(figure, file.origin)
        return as_svg(figure)


def plots(results: Path) -> Iterator[tuple[str, str]]:
    """Name and content of every plot of the figures in a directory. Raises OSError, ValueError for what is no file."""
    scaling, memory = (FigureFile.read(results / f"{name}.json") for name in ("scaling", "memory"))
    peers = {name: FigureFile.read(results / f"{name}.json") for name, _ in SHOWN}
    yield "peers.svg", peers_plot(peers)
    yield "scaling.svg", scaling_plot(scaling, memory)
    yield "sharing.svg", sharing_plot(scaling)


def main() -> int:
    """Write the plots. Returns 0."""
    for name, content in plots(RESULTS):
        (RESULTS / name).write_text(content)
        print(RESULTS / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
