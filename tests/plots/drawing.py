"""What all plots have in common: sizes, colours, and an SVG that is read on light and on dark pages."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.plots.figure_file import FigureFile

OURS, OTHER, BOUND = "#2f81f7", "#8b949e", "#d29922"  # 3:1 and more on white and on GitHub's dark page
# Stands for the page's own text colour, which matplotlib has no word for.
INK = "#010203"
_STYLE = (
    "<style>svg{color:#1f2328}svg text{font-family:system-ui,sans-serif}"
    "@media (prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
)


@contextmanager
def drawing() -> Iterator[None]:
    """Figures that are made inside look like the others."""
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
    """The document, without what differs from day to day."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    head, tag, rest = out.getvalue().replace(INK, "currentColor").partition("<defs>")
    return f"{head}{_STYLE}{tag}{rest}"
