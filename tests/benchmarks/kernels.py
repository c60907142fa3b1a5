"""`python -m tests.benchmarks.kernels [--json FILE] [--only OPERATION]`: every operation on this GPU."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from kernels.dispatch import operation_names
from kernels.interface import Operations
from tests.benchmarks.attention_cases import attention_cases
from tests.benchmarks.case import Case
from tests.benchmarks.elementwise_cases import elementwise_cases
from tests.benchmarks.expert_cases import expert_cases
from tests.benchmarks.gpu_timer import GpuTimer
from tests.benchmarks.machine import Machine, measure_machine
from tests.benchmarks.measurement import Measurement, MedianUs, measure
from tests.benchmarks.model_shape import MODELS, ModelShape
from tests.benchmarks.report import as_json, as_table, describe_machine
from tests.benchmarks.rope_cases import rope_cases
from tests.benchmarks.sampling_cases import sampling_cases
from tests.benchmarks.shared_prefix_cases import shared_prefix_cases
from tests.benchmarks.sizes import Sizes


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 without a GPU or where a case failed."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU: nothing was measured", file=sys.stderr)
        return 1
    from kernels import triton  # kernels are decorated for the GPU that is there

    device = torch.device("cuda")
    timer = GpuTimer(device)
    machine = measure_machine(timer, device)
    print(describe_machine(machine), flush=True)
    cases = [
        case
        for case in all_cases(triton, MODELS, Sizes())
        if not options.only or set(options.only) & set(case.operation.split("+"))
    ]
    return measure_all(cases, device, timer.median_us, machine, options.json)


def measure_all(
    cases: Iterable[Case], device: torch.device, median_us: MedianUs, machine: Machine, json_path: Path | None
) -> int:
    """Print the table and write the JSON. Returns 1 where a case failed, else 0."""
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
    """Exits with 2 and one line where an argument cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kernels", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.add_argument(
        "--only", action="append", choices=operation_names(), metavar="OPERATION", help="measure this one; repeatable"
    )
    options = parser.parse_args(arguments)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: {options.json.absolute().parent} is no directory")
    return options


def all_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Every operation of the interface at every shape."""
    families = (
        *(elementwise_cases, rope_cases, attention_cases, shared_prefix_cases),
        *(expert_cases, sampling_cases),
    )
    return itertools.chain.from_iterable(family(ops, models, sizes) for family in families)


def write_json(path: Path, machine: Machine, measurements: Sequence[Measurement]) -> None:
    """Replace the file."""
    path.write_text(json.dumps(as_json(machine, measurements), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
