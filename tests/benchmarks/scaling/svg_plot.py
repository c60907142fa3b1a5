"""Plots as SVG: panels side by side, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

PANEL, MARGIN = 220, 60  # pixels
COLOURS = ("#1f77b4", "#d62728", "#2ca02c")


@dataclass(frozen=True)
class Panel:
    """One plot: lines over the same x."""

    title: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]  # by name; all above 0


def svg(panels: Sequence[Panel]) -> str:
    """A whole document."""
    width, height = len(panels) * (PANEL + MARGIN) + MARGIN, PANEL + 2 * MARGIN
    parts = [_panel(panel, MARGIN + index * (PANEL + MARGIN)) for index, panel in enumerate(panels)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="10"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _panel(panel: Panel, left: int) -> str:
    points = [point for line in panel.lines.values() for point in line]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    # A factor of ten at least, so that noise does not look like a slope.
    y_mid, y_span = math.sqrt(min(ys) * max(ys)), max(math.log10(max(ys) / min(ys)) * 1.1, 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / xs[0]) / (math.log(xs[-1] / xs[0]) or 1.0)
        up = 0.5 + math.log10(y / y_mid) / y_span
        return left + across * PANEL, MARGIN + (1 - up) * PANEL

    parts = [
        f'<rect x="{left}" y="{MARGIN}" width="{PANEL}" height="{PANEL}" fill="none" stroke="#888"/>',
        _text(left + PANEL / 2, MARGIN - 28, panel.title, size=12),
        _text(left + PANEL / 2, MARGIN - 12, panel.y_label),
    ]
    parts += [_text(place(x, y_mid)[0], MARGIN + PANEL + 14, f"{x:g}") for x in xs]
    for y in (min(ys), max(ys)):
        parts.append(_text(left - 4, place(xs[0], y)[1] + 3, f"{y:.3g}", anchor="end"))
    for index, (name, line) in enumerate(panel.lines.items()):
        parts.append(_line([place(x, y) for x, y in sorted(line)], COLOURS[index % len(COLOURS)]))
        parts.append(
            _text(left + PANEL / 2, MARGIN + PANEL + 28 + 12 * index, name, colour=COLOURS[index % len(COLOURS)])
        )
    return "".join(parts)


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}"/>{dots}'


def _text(x: float, y: float, text: str, *, size: int = 10, anchor: str = "middle", colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
    )
