"""`python -m tests.benchmarks.scaling [--rounds N] [--json FILE] [--svg FILE]`: cost against size.

Time per token against the number of requests, their prompts' and their answers' length, on a small model; resident
memory of `millrace run` and of a worker against the number of requests waiting. Five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.peers.peers_machine import PeersMachine
from tests.benchmarks.scaling import waiting_memory
from tests.benchmarks.scaling.axis import AXES
from tests.benchmarks.scaling.scaling_plot import plot
from tests.benchmarks.scaling.scaling_point import ScalingPoint
from tests.benchmarks.scaling.scaling_report import EXPLANATION, memory_table, points_table
from tests.benchmarks.scaling.scaling_run import measure, small_model
from tests.benchmarks.scaling.waiting_memory import WaitingMemory

WAITING = (1_000, 4_000, 16_000, 48_000)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, write JSON and plot. Returns 0."""
    options = _parse(arguments)
    machine = PeersMachine.read()
    print(machine, flush=True)
    with tempfile.TemporaryDirectory() as name:
        model = small_model(Path(name))
        points = measure(model, AXES, options.rounds)
        for axis in AXES:
            print(f"\n{points_table(_of(axis.name, points))}", flush=True)
        print(f"\n{EXPLANATION}\n", flush=True)
        looks = (waiting_memory.of_run, waiting_memory.of_worker)
        memories = [look(model, count) for look in looks for count in WAITING]
        print(memory_table(memories))
    if options.svg is not None:
        options.svg.write_text(plot({axis.name: _of(axis.name, points) for axis in AXES}, memories))
    if options.json is not None:
        options.json.write_text(json.dumps(_figures(machine, points, memories), indent=1) + "\n")
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
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scaling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times each size is run; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write a plot")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: accepted: 1 or more")
    for name in ("json", "svg"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"--{name}: {path.absolute().parent} is no directory")
    return options


if __name__ == "__main__":
    sys.exit(main())
