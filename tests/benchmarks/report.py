"""Figures as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from tests.benchmarks.machine import Machine
from tests.benchmarks.measurement import Measurement

HEADER = ("operation", "models", "shape", "time us", "of bound", "goal", "library us", "ratio", "library")
EXPLANATION = """\
of bound = amount / time / rate, with the rate measured above (copy: bytes read + written; matmul: bfloat16 FLOP)
ratio    = time of the fastest library call / our time; above 1 ours is faster
time     = median between two CUDA events, L2 emptied before each run; {floor:.1f} us of it are the events' own
amounts:"""


def rate_per_s(machine: Machine, measurement: Measurement) -> float:
    """The bound of a case on this machine."""
    return machine.copy_bytes_per_s if measurement.case.bound == "bandwidth" else machine.matmul_flop_per_s


def describe_machine(machine: Machine) -> str:
    """The machine in three lines."""
    return (
        f"{machine.gpu}, driver {machine.driver}, CUDA {machine.cuda}, torch {machine.torch}, triton {machine.triton}\n"
        f"{machine.checkout}\n"
        f"copy {machine.copy_bytes_per_s / 1e12:.2f} TB/s, matmul {machine.matmul_flop_per_s / 1e12:.0f} TFLOP/s"
    )


def as_table(machine: Machine, measurements: Sequence[Measurement]) -> str:
    """All figures, the formulas below, and what failed."""
    rows = [HEADER, *(_row(machine, measurement) for measurement in measurements)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    formulas = dict.fromkeys(f"  {m.case.operation}: {m.formula}" for m in measurements if m.formula)
    lines += ["", EXPLANATION.format(floor=machine.event_floor_us), *formulas]
    for m in measurements:
        where = f"{m.case.operation} {m.case.shape}"
        lines += [f"failed: {where}: {m.error}"] * bool(m.error)
        lines += [f"library failed: {where}: {name}: {reason}" for name, reason in m.failed_libraries.items()]
    return "\n".join(lines)


def as_json(machine: Machine, measurements: Sequence[Measurement]) -> dict[str, object]:
    """The same as plain data."""
    return {"machine": asdict(machine), "measurements": [_record(machine, m) for m in measurements]}


def _row(machine: Machine, m: Measurement) -> tuple[str, ...]:
    percent, goal = m.percent(rate_per_s(machine, m)), m.case.goal_percent
    verdict = "" if goal is None else f"{goal:.0f}%" if percent is None or percent >= goal else f"{goal:.0f}% missed"
    chain = m.case.operation.split("+")
    return (
        chain[0] if len(chain) == 1 else f"{chain[0]} .. {chain[-1]}",
        m.case.models,
        m.case.shape,
        "failed" if m.time_us is None else f"{m.time_us:.1f}",
        "" if percent is None else f"{percent:.1f}% {m.case.bound}",
        verdict,
        "" if m.library_us is None else f"{m.library_us:.1f}",
        "" if m.ratio is None else f"{m.ratio:.2f}",
        m.library,
    )


def _record(machine: Machine, m: Measurement) -> dict[str, object]:
    return {
        "operation": m.case.operation,
        "models": m.case.models,
        "shape": m.case.shape,
        "time_us": m.time_us,
        "bound": m.case.bound,
        "amount": m.amount,
        "formula": m.formula,
        "percent": m.percent(rate_per_s(machine, m)),
        "goal_percent": m.case.goal_percent,
        "library": m.library,
        "library_us": m.library_us,
        "ratio": m.ratio,
        "error": m.error,
        "failed_libraries": m.failed_libraries,
    }
