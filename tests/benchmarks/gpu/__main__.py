"""Measures the whole engine on a GPU, section by section: `python -m tests.benchmarks.gpu`, see `--help`."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from engine.engine import Engine
from engine.errors import EngineError
from settings import parse_assignments
from tests.benchmarks.gpu.measure import DecodeCells, EngineLoad, count_workload, run_workload
from tests.benchmarks.gpu.random_model import MODELS, GpuModel, load_random, random_checkpoint, write_model_directory
from tests.benchmarks.gpu.report import TRIAL, Figure, GpuResult, as_json, find_goals, goals_table, header, line
from tests.benchmarks.gpu.transformers_peer import CASES, DTYPES, check_parity, run_transformers
from tests.benchmarks.gpu.workload import (
    FORMULA,
    H200_BYTES_PER_S,
    H200_FLOP_PER_S,
    Deadline,
    GpuSizes,
    GpuWorkload,
    Limits,
    nano_vllm_workload,
    prefill_workload,
    shared_prefix_workload,
)
from tests.benchmarks.machine import Checkout, GpuTimer, Machine, measure_machine
from tests.benchmarks.peers.floor import ModelCost

SECTIONS = ("parity", "nano-vllm", "decode", "prefill", "shared-prefix", "peer")
BUDGET_S = 450.0
DESCRIPTION = """\
The whole engine on this GPU: parity with transformers on a small checkpoint, then Qwen3-0.6B, 8B and 30B-A3B with
random weights made in its memory: the nano-vllm and the shared-prefix workload, prompts alone, decode steps by batch
size with and without CUDA graphs, and transformers' continuous batching beside it. One call takes less than 8 minutes
on an H200.
"""

PEER_MODEL = "Qwen3-0.6B"

EXIT_DIFFERS = 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with 2 and one line if an argument cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=DESCRIPTION)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON, after each of them")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}; repeatable"
    )
    parser.add_argument(
        "--model", action="append", choices=tuple(MODELS), metavar="NAME", help=f"of {', '.join(MODELS)}; repeatable"
    )
    parser.add_argument(
        "--batch",
        action="append",
        type=int,
        metavar="N",
        help="a batch of decode steps, in place of all; repeatable",
    )
    parser.add_argument("--graphs", action="store_true", help="leave out the visits without CUDA graphs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an engine's setting")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="S", help="nothing is begun after so many seconds"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --tiny")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models and counts, to try the script: its figures are no measurement"
    )
    options = parser.parse_args(arguments)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: {options.json.absolute().parent} is no directory")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: needs --tiny")
    if options.budget_s <= 0:
        parser.error("--budget-s: accepted: more than 0")
    if any(batch < 1 for batch in options.batch or ()):
        parser.error(f"--batch: {min(options.batch)}; accepted: at least 1")
    options.sections = tuple(options.only or SECTIONS)
    options.models = tuple(name for name in MODELS if not options.model or name in options.model)
    return options


@dataclass(frozen=True)
class _Visit:
    """A model that is loaded once, and the sections that are measured on it."""

    model: str
    graphs: bool
    sections: tuple[str, ...]


# What the goals need comes first, the peer before the steps without graphs.
WITH_GRAPHS = (
    _Visit("Qwen3-0.6B", True, ("nano-vllm", "decode", "prefill", "shared-prefix")),
    _Visit("Qwen3-8B", True, ("decode", "prefill", "nano-vllm", "shared-prefix")),
    _Visit("Qwen3-30B-A3B", True, ("decode", "prefill", "nano-vllm", "shared-prefix")),
)
WITHOUT_GRAPHS = tuple(_Visit(visit.model, False, ("decode",)) for visit in WITH_GRAPHS)


class GpuRun:
    """Measures what the options ask for. A failure costs its own section only."""

    def __init__(self, options: argparse.Namespace, machine: Machine, directory: Path, deadline: Deadline) -> None:
        self._options = options
        self._machine = machine
        self._directory = directory
        self._device = torch.device(options.device)
        sizes = GpuSizes.tiny() if options.tiny else GpuSizes()
        batches = tuple(sorted(set(options.batch or sizes.batches), reverse=True))
        self._sizes = replace(sizes, batches=batches)
        self._deadline = deadline

    def measure(self) -> Iterator[GpuResult]:
        """Yield each figure as soon as it is measured."""
        wanted = self._options.sections
        if "parity" in wanted:
            for family, _ in CASES:
                yield from self._guarded("parity", family, None, partial(self._parity, family))
        yield from self._visits(WITH_GRAPHS)
        if "peer" in wanted and PEER_MODEL in self._options.models:
            yield from self._guarded("peer", PEER_MODEL, None, self._peer)
            free_memory(self._device)
        if not self._options.graphs:
            yield from self._visits(WITHOUT_GRAPHS)

    def _visits(self, visits: tuple[_Visit, ...]) -> Iterator[GpuResult]:
        for visit in visits:
            if visit.model not in self._options.models:
                continue
            graphs = visit.graphs and self._device.type == "cuda"
            slot = EngineSlot(partial(self._load, visit.model, graphs), self._device)
            for section in visit.sections:
                if section in self._options.sections:
                    run = partial(self._section, section, visit.model, slot)
                    for result in self._guarded(section, visit.model, graphs, run):
                        yield result
                        if result.figure is None:  # whatever it left running is nobody's measurement
                            slot.discard()
            slot.discard()

    def _section(self, section: str, name: str, slot: EngineSlot) -> Iterator[Figure]:
        self._deadline.check()
        if slot.is_empty:
            begin = time.perf_counter()
            yield EngineLoad.of(slot.get(), time.perf_counter() - begin)
        engine, model, limits = slot.get(), self._model(name), self._limits(name)
        if section == "decode":
            yield from DecodeCells(engine, limits, self._sizes, self._deadline).measure()
        elif section == "prefill":
            yield from self._prefill(engine, limits)
        elif section == "shared-prefix":
            yield from self._workloads(engine, limits, [shared_prefix_workload(self._sizes)])
        else:
            loads = [nano_vllm_workload(self._sizes, trial) for trial in range(model.num_trials)]
            yield from self._workloads(engine, limits, loads)

    def _prefill(self, engine: Engine, limits: Limits) -> Iterator[Figure]:
        """Once to warm up, once to time, once to count."""
        for trial in range(2):
            found = run_workload(engine, prefill_workload(self._sizes, trial), limits, self._deadline)
        counts = count_workload(engine, prefill_workload(self._sizes, 2), self._deadline)
        yield replace(found, counts=counts)

    def _workloads(self, engine: Engine, limits: Limits, loads: list[GpuWorkload]) -> Iterator[Figure]:
        run_workload(engine, loads[0].warm_up(self._sizes.max_token_id), limits, self._deadline)
        for load in loads:
            yield run_workload(engine, load, limits, self._deadline)

    def _parity(self, family: str) -> Iterator[Figure]:
        for (known, shape), dtype in ((case, dtype) for case in CASES for dtype in DTYPES):
            if known == family:
                self._deadline.check()
                yield check_parity(known, shape, dtype, self._sizes, self._device)
                free_memory(self._device)

    def _peer(self) -> Iterator[Figure]:
        self._deadline.check()
        model = self._model(PEER_MODEL)
        checkpoint = random_checkpoint(model.parsed, self._device)
        sizes = replace(self._sizes, peer_s=min(self._sizes.peer_s, self._deadline.left_s))
        yield run_transformers(model.config, checkpoint, nano_vllm_workload(sizes), self._device, sizes)

    def _load(self, name: str, graphs: bool) -> Engine:
        model, path = self._model(name), self._directory / name
        if not path.exists():
            write_model_directory(model, path)
        overrides: Mapping[str, object] = {
            **self._sizes.engine,
            "engine.cuda_graphs.enabled": graphs,
            **parse_assignments(self._options.set),
        }
        engine = load_random(model, path, self._device, overrides)
        gc.collect()
        gc.freeze()  # as a worker does: a collection through PyTorch and the model stops the steps for 270 ms,
        gc.set_threshold(10_000)  # and one through what requests leave, three times in 5 s, for 12 to 23
        return engine

    def _guarded(
        self, section: str, model: str, graphs: bool | None, figures: Callable[[], Iterator[Figure]]
    ) -> Iterator[GpuResult]:
        reason = ""
        try:
            for figure in figures():
                yield GpuResult("load" if isinstance(figure, EngineLoad) else section, model, graphs, figure)
        except Exception as error:  # a seam: a driver, a compiler, torch and ours raise what they raise
            reason = _one_line(error)
        if reason:
            yield GpuResult(section, model, graphs, None, reason)

    def _model(self, name: str) -> GpuModel:
        return MODELS[name].tiny() if self._options.tiny else MODELS[name]

    def _limits(self, name: str) -> Limits:
        cost = ModelCost.of(self._model(name).parsed)
        return Limits(cost, self._machine.copy_bytes_per_s, self._machine.matmul_flop_per_s)


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


class EngineSlot:
    """Loads an engine when it is first needed and frees its memory afterwards: two models do not fit."""

    def __init__(self, load: Callable[[], Engine], device: torch.device) -> None:
        self._load = load
        self._device = device
        self._engine: Engine | None = None

    @property
    def is_empty(self) -> bool:
        """Whether `get` would load."""
        return self._engine is None

    def get(self) -> Engine:
        """The engine, loaded by the first call and by the first after `discard`."""
        if self._engine is None:
            self._engine = self._load()
        return self._engine

    def discard(self) -> None:
        """Close the engine, whatever it was doing, and free its memory."""
        # After a fault of the device every call fails; the next section says so.
        with suppress(RuntimeError, EngineError):
            if self._engine is not None:
                self._engine.close()
        self._engine = None
        free_memory(self._device)


def free_memory(device: torch.device) -> None:
    """Return unused memory to the GPU. On a CPU, where the models are tiny, do nothing."""
    if device.type == "cuda":
        gc.collect()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write each figure. Returns 0; 1 without a GPU or if something failed; 2 if our tokens differ from
    transformers'.
    """
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
    machine = describe_machine(torch.device(options.device))
    print(machine if is_measurement else TRIAL, flush=True)
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


def describe_machine(device: torch.device) -> Machine:
    """The GPU and its measured rates; on a CPU, where nothing is measured, an H200's rates."""
    if device.type == "cuda":
        try:
            return measure_machine(GpuTimer(device), device)
        finally:
            free_memory(device)  # its buffers would count as taken when the first model is loaded
    rates = (H200_BYTES_PER_S, H200_FLOP_PER_S)
    about = ("none", "none", "none", torch.__version__, triton.__version__, Checkout.read())
    return Machine(*about, *rates, event_floor_us=0.0, timing="none")


def _write(path: Path | None, machine: Machine | None, results: Sequence[GpuResult], about: dict[str, Any]) -> None:
    """Called after each figure: a run that is cut off keeps what it measured."""
    if path is not None:
        path.write_text(json.dumps(as_json(machine, results, about), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
