"""`python -m tests.plots`: draw tests/benchmarks/results/*.json as SVG files beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.plots.figure_file import FigureFile
from tests.plots.peers_plot import peers_plot
from tests.plots.scaling_plot import scaling_plot
from tests.plots.sharing_plot import sharing_plot

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


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
