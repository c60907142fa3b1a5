"""Figures of the scaling benchmark as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.scaling.scaling_point import ScalingPoint, exponent
from tests.benchmarks.scaling.waiting_memory import WaitingMemory

EXPLANATION = """\
x before: against the row above; arithmetic: what FLOP per token alone would make of it (attention sees more keys)
exponent: b in seconds ~ size^b over all rows, and over the last two (64 requests run at a time: before that a step
grows cheaper per token); beside it the exponent of FLOP. A term that grows faster than the work shows as a time
exponent above that of the arithmetic."""


def points_table(points: Sequence[ScalingPoint]) -> str:
    """One axis."""
    lines = [
        f"| {points[0].axis} | tokens | seconds | us per token | x before | x before, arithmetic |",
        "|" + "---|" * 6,
    ]
    for before, point in zip([None, *points], points, strict=False):
        time = flop = ""
        if before is not None:
            time = f"{point.us_per_token / before.us_per_token:.2f}"
            flop = f"{point.flop_per_token / before.flop_per_token:.2f}"
        cells = f"{point.size} | {point.num_tokens} | {point.seconds:.3f} | {point.us_per_token:.1f} | {time} | {flop}"
        lines.append(f"| {cells} |")
    return "\n".join([*lines, "", exponents(points)])


def exponents(points: Sequence[ScalingPoint]) -> str:
    """Of time and of arithmetic over all sizes, and between the last two."""
    texts = []
    for name, chosen in (("all", points), ("last two", points[-2:])):
        sizes = [point.size for point in chosen]
        time = exponent(sizes, [point.seconds for point in chosen])
        flop = exponent(sizes, [point.flop for point in chosen])
        texts.append(f"{name}: time {time:.2f}, arithmetic {flop:.2f}")
    return f"exponent of {points[0].axis}: {'; '.join(texts)}"


def memory_table(memories: Sequence[WaitingMemory]) -> str:
    """Resident memory against the requests waiting."""
    lines = ["| process | requests waiting | resident, MB | at most, MB | bytes more a request |", "|" + "---|" * 5]
    firsts = {memory.process: memory for memory in reversed(memories)}
    for memory in memories:
        first = firsts[memory.process]
        more = ""
        if memory is not first:
            growth = memory.peak_bytes - first.peak_bytes
            more = f"{growth / (memory.num_waiting - first.num_waiting):.0f}"
        sizes = f"{memory.resident_bytes / 1e6:.0f} | {memory.peak_bytes / 1e6:.0f}"
        lines.append(f"| {memory.process} | {memory.num_waiting} | {sizes} | {more} |")
    return "\n".join(lines)
