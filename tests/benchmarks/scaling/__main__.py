"""Measures cost against size: `python -m tests.benchmarks.scaling [--only WHAT] [--rounds N] [--json FILE]`.

One thread's processor time per token against the number of requests, their prompts' and their answers' length, and what
of a prompt its neighbours do not share, on a small model; resident memory of `millrace run` and of a worker against the
number of requests waiting. Four minutes on a free machine. `python -m tests.plots` draws the figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.machine import PeersMachine, write_figures
from tests.benchmarks.scaling.measure import (
    AXES,
    ScalingPoint,
    WaitingMemory,
    exponent,
    measure,
    memory_of_run,
    memory_of_worker,
    small_model,
)

EXPLANATION = """\
x before: against the row above; arithmetic: what FLOP per token alone would make of it (attention sees more keys)
exponent: b in seconds ~ size^b over all rows, and over the last two (64 requests run at a time: before that a step
grows cheaper per token); beside it the exponent of FLOP. A term that grows faster than the work shows as a time
exponent above that of the arithmetic."""

WAITING = (1_000, 4_000, 16_000, 48_000)
MEMORY = "memory"


def points_table(points: Sequence[ScalingPoint]) -> str:
    """A table of one axis: time a token by size."""
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
    """The exponents of time and of arithmetic over all sizes, and between the last two."""
    texts = []
    for name, chosen in (("all", points), ("last two", points[-2:])):
        sizes = [point.size for point in chosen]
        time = exponent(sizes, [point.seconds for point in chosen])
        flop = exponent(sizes, [point.flop for point in chosen])
        texts.append(f"{name}: time {time:.2f}, arithmetic {flop:.2f}")
    return f"exponent of {points[0].axis}: {'; '.join(texts)}"


def memory_table(memories: Sequence[WaitingMemory]) -> str:
    """A table of resident memory by the number of requests waiting."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the JSON. Returns 0."""
    options = _parse(arguments)
    machine = PeersMachine.read()
    print(machine, flush=True)
    axes = [axis for axis in AXES if axis.name in options.only]
    memories: list[WaitingMemory] = []
    with tempfile.TemporaryDirectory() as name:
        model = small_model(Path(name))
        points = measure(model, axes, options.rounds) if axes else []
        for axis in axes:
            print(f"\n{points_table(_of(axis.name, points))}", flush=True)
        print(f"\n{EXPLANATION}\n", flush=True)
        if MEMORY in options.only:
            looks = (memory_of_run, memory_of_worker)
            memories = [look(model, count) for look in looks for count in WAITING]
            print(memory_table(memories))
    if options.json is not None:
        write_figures(options.json, "scaling", arguments, _figures(machine, points, memories))
    return 0


def _of(axis: str, points: Sequence[ScalingPoint]) -> list[ScalingPoint]:
    return [point for point in points if point.axis == axis]


def _figures(
    machine: PeersMachine, points: Sequence[ScalingPoint], memories: Sequence[WaitingMemory]
) -> dict[str, object]:
    return {
        "machine": asdict(machine),
        "points": [{**asdict(point), "us_per_token": point.us_per_token} for point in points],
        "memories": [asdict(memory) for memory in memories],
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    everything = (*(axis.name for axis in AXES), MEMORY)
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scaling", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=everything, metavar="WHAT", help=f"of {', '.join(everything)}; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times each size is run; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args(arguments)
    options.only = options.only or everything
    if options.rounds < 1:
        parser.error("--rounds: accepted: 1 or more")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: {options.json.absolute().parent} is no directory")
    return options


if __name__ == "__main__":
    sys.exit(main())
