"""`python -m tests.benchmarks.queue [--prompts N] [--workers 1 2 4] [--repeats N] [--json FILE]`: the queue alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.queue_machine import QueueMachine
from tests.benchmarks.queue_measurement import QueueMeasurement
from tests.benchmarks.queue_report import as_json, as_table, describe_machine
from tests.benchmarks.queue_run import run_queue


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write the JSON; 0. Takes one to three minutes with the defaults."""
    options = parse(arguments)
    machine = QueueMachine.read()
    print(describe_machine(machine), flush=True)
    measurements: list[QueueMeasurement] = []
    for num_workers in options.workers:
        for _ in range(options.repeats):
            measurements.append(run_queue(num_workers, options.prompts))
            print(".", end="", flush=True)
    print("\n" + as_table(measurements))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(machine, measurements), indent=1) + "\n")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exits with 2 and one line where an argument cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.queue", description=__doc__)
    parser.add_argument("--prompts", type=int, default=20_000, metavar="N", help="in each run, over all workers")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="worker processes")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="runs of each number of workers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args(arguments)
    if min(options.workers) < 1 or options.repeats < 1:
        parser.error("--workers and --repeats: at least 1")
    if not max(options.workers) <= options.prompts <= 50_000 * min(options.workers):
        parser.error("--prompts: at least one a worker, at most 50000 a worker")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: {options.json.absolute().parent} is no directory")
    return options


if __name__ == "__main__":
    sys.exit(main())
