"""Figures of the queue as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from tests.benchmarks.queue_machine import QueueMachine
from tests.benchmarks.queue_measurement import QueueMeasurement

HEADER = (
    "workers",
    "prompts/s per worker",
    "all workers",
    "planning s",
    "after planning, per worker",
    "worker us",
    "Redis us",
    "submit us",
    "submit, Redis us",
    "results us",
)
EXPLANATION = """\
prompts/s: from the jobs' acceptance to the last record, planning included; median of the runs, spread in brackets
us: CPU microseconds a prompt, user and system: of the worker processes (planning included), of Redis while they ran,
of the producer and of Redis while lines were staged, of reading every record back
The engine answers at once: its checks, scheduling, model, sampling and detokenising are skipped; tokenising is not."""


def describe_machine(machine: QueueMachine) -> str:
    """The machine in two lines."""
    return (
        f"{machine.cpu}, {machine.num_cpus} CPUs, load before {machine.load:.2f}; {machine.versions}\n"
        f"{machine.checkout}"
    )


def as_table(measurements: Sequence[QueueMeasurement]) -> str:
    """A Markdown table, a row for each number of workers."""
    counts = sorted({m.num_workers for m in measurements})
    rows = [_row([m for m in measurements if m.num_workers == count]) for count in counts]
    lines = ["| " + " | ".join(row) + " |" for row in (HEADER, ("---:",) * len(HEADER), *rows)]
    return "\n".join([*lines, "", EXPLANATION])


def as_json(machine: QueueMachine, measurements: Sequence[QueueMeasurement]) -> dict[str, object]:
    """The same as plain data, a record for each run."""
    return {"machine": asdict(machine), "measurements": [_record(m) for m in measurements]}


def _row(runs: Sequence[QueueMeasurement]) -> tuple[str, ...]:
    rates = sorted(run.prompts_per_s_per_worker for run in runs)
    spread = f" ({rates[0]:.0f} - {rates[-1]:.0f})" if len(rates) > 1 else ""

    def us(field: str) -> str:
        return f"{median(run.us_per_prompt(getattr(run, field)) for run in runs):.0f}"

    return (
        str(runs[0].num_workers),
        f"{median(rates):.0f}{spread}",
        f"{median(rates) * runs[0].num_workers:.0f}",
        f"{median(run.planning_s for run in runs):.2f}",
        f"{median(run.shards_per_s_per_worker for run in runs):.0f}",
        us("worker_cpu_s"),
        us("redis_cpu_s"),
        us("submit_cpu_s"),
        us("submit_redis_cpu_s"),
        us("results_cpu_s"),
    )


def _record(m: QueueMeasurement) -> dict[str, object]:
    return {
        **asdict(m),
        "prompts_per_s_per_worker": m.prompts_per_s_per_worker,
        "shards_per_s_per_worker": m.shards_per_s_per_worker,
    }
