"""Cost against the share of the prompts that is the same in all of them."""

from __future__ import annotations

from matplotlib.figure import Figure

from tests.benchmarks.scaling.axis import OWN_TOKENS
from tests.plots.drawing import BOUND, OURS, as_svg, drawing, footer, grid
from tests.plots.figure_file import FigureFile


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
