"""`python -m tests.benchmarks.scaling [--only WHAT] [--rounds N] [--json FILE]`: cost against size.

Time per token against the number of requests, their prompts' and their answers' length, and what of a prompt its
neighbours do not share, on a small model; resident memory of `millrace run` and of a worker against the number of
requests waiting. Five minutes on two cores. `python -m tests.plots` draws the figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.peers.peers_machine import PeersMachine
from tests.benchmarks.scaling import waiting_memory
from tests.benchmarks.scaling.axis import AXES
from tests.benchmarks.scaling.scaling_point import ScalingPoint
from tests.benchmarks.scaling.scaling_report import EXPLANATION, memory_table, points_table
from tests.benchmarks.scaling.scaling_run import measure, small_model
from tests.benchmarks.scaling.waiting_memory import WaitingMemory
from tests.benchmarks.write_figures import write_figures

WAITING = (1_000, 4_000, 16_000, 48_000)
MEMORY = "memory"


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
            looks = (waiting_memory.of_run, waiting_memory.of_worker)
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
