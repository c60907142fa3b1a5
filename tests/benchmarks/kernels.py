"""Measures every operation on this GPU, or the native kernels on this CPU beside PyTorch.

`python -m tests.benchmarks.kernels [--cpu VARIANT [--threads N]] [--json FILE] [--only OPERATION]`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels import cpu
from kernels.dispatch import operation_names
from kernels.interface import Operations
from kernels.native.library import NAMED_VARIANTS, VARIANTS
from kernels.native.operations import native_operations
from tests.benchmarks.attention_cases import (
    attention_cases,
    cpu_attention_cases,
    float8_cache_cases,
    rope_cases,
    shared_prefix_cases,
)
from tests.benchmarks.kernel_inputs import (
    CPU_MODELS,
    CPU_SIZES,
    MODELS,
    Bound,
    Case,
    ModelShape,
    Sizes,
    beside,
)
from tests.benchmarks.layer_cases import cpu_product_cases, elementwise_cases, expert_cases, quantised_cases
from tests.benchmarks.machine import CpuTimer, GpuTimer, Machine, measure_cpu, measure_machine
from tests.benchmarks.operation_cases import OperationCase
from tests.benchmarks.sampling_cases import sampling_cases

# Median microseconds of a run, with an optional action before each run that is not timed.
MedianUs = Callable[[Callable[[], object], Callable[[], None] | None], float]

# What is native on a CPU beside attention and products.
CPU_PASSES = (
    *("rms_norm", "fused_add_rms_norm", "qk_norm_rope_store_kv", "silu_and_mul"),
    *("route_topk", "combine_experts", "choose_tokens"),
)

HEADER = ("operation", "models", "shape", "library us", "library", "time us", "ratio", "rate", "of bound", "goal")
RATE_UNITS: dict[Bound, str] = {"bandwidth": "GB/s", "matmul": "GFLOP/s"}
EXPLANATION = """\
rate     = amount / time
of bound = rate / the rate measured above (copy: bytes read + written; product: bfloat16 FLOP)
ratio    = time of the fastest library call / our time; above 1 ours is faster
time     = {timing}; a run of nothing takes {floor:.1f} us
amounts:"""


@dataclass(frozen=True)
class Measurement:
    """Our time of one case, and that of the fastest library call."""

    case: Case
    amount: int = 0
    formula: str = ""
    time_us: float | None = None  # None: failed, see error
    library: str = ""  # the fastest one that ran
    library_us: float | None = None
    error: str = ""
    failed_libraries: dict[str, str] = field(default_factory=dict)  # name -> why

    def percent(self, rate_per_s: float) -> float | None:
        """Share of the bound that was reached: amount / time / rate."""
        return None if self.time_us is None else 100 * self.amount / (self.time_us / 1e6) / rate_per_s

    @property
    def ratio(self) -> float | None:
        """Time of the library call / our time: above 1 we are faster."""
        return None if self.time_us is None or self.library_us is None else self.library_us / self.time_us


def measure(case: Case, device: torch.device, median_us: MedianUs) -> Measurement:
    """Allocate the case, time our operation and every library call. A failure is recorded and costs one figure only."""
    try:
        work = case.prepare(device)
        time_us = median_us(work.run, work.restore)
    except Exception as error:  # a seam: kernels raise what torch, triton and the driver raise
        return Measurement(case, error=_one_line(error))
    library_us: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, run in work.libraries.items():
        try:
            library_us[name] = median_us(run, work.restore)
        except Exception as error:  # the same seam; a library that lacks the operation says so in many ways
            failed[name] = _one_line(error)
    best = min(library_us, key=lambda name: library_us[name], default="")
    return Measurement(case, work.amount, work.formula, time_us, best, library_us.get(best), "", failed)


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def rate_per_s(machine: Machine, measurement: Measurement) -> float:
    """The measured rate that bounds a case: bytes or FLOP a second."""
    return machine.copy_bytes_per_s if measurement.case.bound == "bandwidth" else machine.matmul_flop_per_s


def as_table(machine: Machine, measurements: Sequence[Measurement]) -> str:
    """The figures, then the formulas and what failed."""
    rows = [HEADER, *(_row(machine, measurement) for measurement in measurements)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    formulas = dict.fromkeys(f"  {m.case.operation}: {m.formula}" for m in measurements if m.formula)
    lines += ["", EXPLANATION.format(timing=machine.timing, floor=machine.event_floor_us), *formulas]
    for m in measurements:
        where = f"{m.case.operation} {m.case.shape}"
        lines += [f"failed: {where}: {m.error}"] * bool(m.error)
        lines += [f"library failed: {where}: {name}: {reason}" for name, reason in m.failed_libraries.items()]
    return "\n".join(lines)


def as_json(machine: Machine, measurements: Sequence[Measurement]) -> dict[str, object]:
    """The machine and all figures as plain data."""
    return {"machine": asdict(machine), "measurements": [record(machine, m) for m in measurements]}


def _row(machine: Machine, m: Measurement) -> tuple[str, ...]:
    percent, goal = m.percent(rate_per_s(machine, m)), m.case.goal_percent
    verdict = "" if goal is None else f"{goal:.0f}%" if percent is None or percent >= goal else f"{goal:.0f}% missed"
    chain = m.case.operation.split("+")
    return (
        chain[0] if len(chain) == 1 else f"{chain[0]} .. {chain[-1]}",
        m.case.models,
        m.case.shape,
        "" if m.library_us is None else f"{m.library_us:.1f}",
        m.library,
        "failed" if m.time_us is None else f"{m.time_us:.1f}",
        "" if m.ratio is None else f"{m.ratio:.2f}",
        "" if m.time_us is None else f"{m.amount / m.time_us / 1e3:.3g} {RATE_UNITS[m.case.bound]}",
        "" if percent is None else f"{percent:.1f}% {m.case.bound}",
        verdict,
    )


def record(machine: Machine, m: Measurement) -> dict[str, object]:
    """A figure as plain data."""
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


def check_operation(case: OperationCase, ops: Operations, device: torch.device, repeats: int) -> dict[str, Any]:
    """Whether the results of these operations are close to the reference's and equal to themselves."""
    error, differing = "", 0
    try:
        # Compared where our results are: on a CPU that takes 20 s of a cache that a GPU's kernels wrote in a blink.
        expected = [tensor.to(device) for tensor in case.run(case.peer, torch.device("cpu"))]
        run = case.on(device)
        first = run(ops)
        for found, wanted in zip(first, expected, strict=True):
            case.compare(found, wanted)
        for _ in range(repeats - 1):
            differing += any(not _same_bits(x, y) for x, y in zip(run(ops), first, strict=True))
    except Exception as raised:  # a seam: a driver, a compiler and torch raise what they raise
        error = _one_line(raised)
    return {"ok": not error and not differing, "differing_repeats": differing, **({"error": error} if error else {})}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases. Returns 0; 1 without a GPU or if a case failed; with --cpu a CPU takes the GPU's place."""
    options = parse(arguments)
    if options.cpu is not None:
        return _measure_cpu(options)
    if not torch.cuda.is_available():
        print("no CUDA GPU: nothing was measured", file=sys.stderr)
        return 1
    from kernels import triton  # kernels are decorated for the GPU that is there

    device = torch.device("cuda")
    timer = GpuTimer(device)
    machine = measure_machine(timer, device)
    print(machine, flush=True)
    cases = [
        case
        for case in gpu_cases(triton, MODELS, Sizes())
        if not options.only or set(options.only) & set(case.operation.split("+"))
    ]
    return measure_all(cases, device, timer.median_us, machine, options.json)


def _measure_cpu(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    timer = CpuTimer()
    machine = measure_cpu(timer)
    print(machine, flush=True)
    cases = [
        case
        for case in map(beside, cpu_cases(native_operations(options.cpu)), cpu_cases(cpu))
        if not options.only or case.operation in options.only
    ]
    return measure_all(cases, torch.device("cpu"), timer.median_us, machine, options.json)


def measure_all(
    cases: Iterable[Case], device: torch.device, median_us: MedianUs, machine: Machine, json_path: Path | None
) -> int:
    """Print the table and write the JSON. Returns 1 if a case failed, else 0."""
    measurements: list[Measurement] = []
    for case in cases:
        measurements.append(measure(case, device, median_us))
        torch.cuda.empty_cache()
        print(".", end="", flush=True)
        if json_path is not None:  # after each case: a run that is cut off keeps what it measured
            write_json(json_path, machine, measurements)
    print("\n" + as_table(machine, measurements))
    return 1 if any(measurement.error for measurement in measurements) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with 2 and one line if an argument cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kernels", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument(
        "--only", action="append", choices=operation_names(), metavar="OPERATION", help="measure this one; repeatable"
    )
    parser.add_argument("--cpu", choices=(*VARIANTS, *NAMED_VARIANTS), metavar="VARIANT", help="these native kernels")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of PyTorch, with --cpu (default: 1)")
    options = parser.parse_args(arguments)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: {options.json.absolute().parent} is no directory")
    return options


def all_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Every operation of the interface at every shape."""
    families = (
        *(elementwise_cases, rope_cases, attention_cases, shared_prefix_cases),
        *(expert_cases, sampling_cases, quantised_cases),
    )
    return itertools.chain.from_iterable(family(ops, models, sizes) for family in families)


def gpu_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Those, and what only a GPU has."""
    yield from all_cases(ops, models, sizes)
    yield from float8_cache_cases(ops, models, sizes)


def cpu_cases(ops: Operations) -> Iterator[Case]:
    """What is native on a CPU: attention with the heads of all models, the rest at the widths of the small ones."""
    yield from cpu_attention_cases(ops, CPU_MODELS)
    small = CPU_MODELS[:2]  # a dense one and one with experts
    yield from cpu_product_cases(ops, small)
    yield from (case for case in all_cases(ops, small, CPU_SIZES) if case.operation in CPU_PASSES)


def write_json(path: Path, machine: Machine, measurements: Sequence[Measurement]) -> None:
    """Write the figures to `path`, replacing what is there."""
    path.write_text(json.dumps(as_json(machine, measurements), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
