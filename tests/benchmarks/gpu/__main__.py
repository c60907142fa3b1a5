"""`python -m tests.benchmarks.gpu`: see gpu_options.py."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from tests.benchmarks.checkout import Checkout
from tests.benchmarks.gpu.deadline import Deadline
from tests.benchmarks.gpu.engine_slot import free_memory
from tests.benchmarks.gpu.gpu_goal import find_goals
from tests.benchmarks.gpu.gpu_options import parse
from tests.benchmarks.gpu.gpu_report import TRIAL, as_json, goals_table, header, line
from tests.benchmarks.gpu.gpu_result import GpuResult
from tests.benchmarks.gpu.gpu_run import GpuRun
from tests.benchmarks.gpu.limits import FORMULA, H200_BYTES_PER_S, H200_FLOP_PER_S
from tests.benchmarks.gpu_timer import GpuTimer
from tests.benchmarks.machine import Machine, measure_machine
from tests.benchmarks.report import describe_machine

EXIT_DIFFERS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 without a GPU or where something failed; 2 where our tokens are not transformers'."""
    options = parse(arguments)
    deadline = Deadline(options.budget_s)
    has_device = options.device == "cpu" or torch.cuda.is_available()
    is_measurement = options.device == "cuda" and has_device and not options.tiny
    about: dict[str, Any] = {
        "is_measurement": is_measurement,
        "arguments": list(sys.argv[1:] if arguments is None else arguments),
    }
    results: list[GpuResult] = []
    if not has_device:
        print(goals_table(find_goals(results, None)))
        _write(options.json, None, results, about)
        print("no CUDA GPU: nothing was measured", file=sys.stderr)
        return 1
    machine = _machine(torch.device(options.device))
    print(describe_machine(machine) if is_measurement else TRIAL, flush=True)
    with tempfile.TemporaryDirectory(prefix="millrace-gpu-") as folder:
        for result in GpuRun(options, machine, Path(folder), deadline).measure():
            if not results or results[-1].section != result.section:
                print(header(result.section))
            print(line(result), flush=True)
            results.append(result)
            _write(options.json, machine, results, about)
            if result.differs:
                print("transformers' tokens are others: nothing else is measured", file=sys.stderr)
                return EXIT_DIFFERS
    print(f"\n{FORMULA}\n\n{goals_table(find_goals(results, machine.gpu if is_measurement else None))}")
    print(f"\n{deadline.seconds - deadline.left_s:.0f} s in all{'' if is_measurement else '; ' + TRIAL}")
    return 1 if any(result.figure is None for result in results) else 0


def _machine(device: torch.device) -> Machine:
    if device.type == "cuda":
        try:
            return measure_machine(GpuTimer(device), device)
        finally:
            free_memory(device)  # its buffers would count as taken when the first model is loaded
    rates = (H200_BYTES_PER_S, H200_FLOP_PER_S)
    return Machine("none", "none", "none", torch.__version__, triton.__version__, Checkout.read(), *rates, 0.0)


def _write(path: Path | None, machine: Machine | None, results: Sequence[GpuResult], about: dict[str, Any]) -> None:
    """After each figure: a run that is cut off keeps what it measured."""
    if path is not None:
        path.write_text(json.dumps(as_json(machine, results, about), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
