"""One run of the benchmark, section by section."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.engine import Engine
from settings import parse_assignments
from tests.benchmarks.gpu.deadline import Deadline
from tests.benchmarks.gpu.decode_cells import DecodeCells
from tests.benchmarks.gpu.engine_load import EngineLoad
from tests.benchmarks.gpu.engine_slot import EngineSlot, free_memory
from tests.benchmarks.gpu.gpu_engine import load_random, write_model_directory
from tests.benchmarks.gpu.gpu_model import MODELS, GpuModel
from tests.benchmarks.gpu.gpu_result import Figure, GpuResult
from tests.benchmarks.gpu.gpu_sizes import GpuSizes
from tests.benchmarks.gpu.gpu_workload import GpuWorkload, nano_vllm_workload, shared_prefix_workload
from tests.benchmarks.gpu.limits import Limits
from tests.benchmarks.gpu.parity import CASES, DTYPES, check_parity
from tests.benchmarks.gpu.random_shard import random_checkpoint
from tests.benchmarks.gpu.throughput import run_workload
from tests.benchmarks.gpu.transformers_peer import run_transformers
from tests.benchmarks.machine import Machine
from tests.benchmarks.peers.model_cost import ModelCost

PEER_MODEL = "Qwen3-0.6B"


@dataclass(frozen=True)
class _Visit:
    """A model that is loaded once, for some sections."""

    model: str
    graphs: bool
    sections: tuple[str, ...]


# What the goals need comes first, the peer before the steps without graphs.
WITH_GRAPHS = (
    _Visit("Qwen3-0.6B", True, ("nano-vllm", "decode", "shared-prefix")),
    _Visit("Qwen3-8B", True, ("decode", "nano-vllm", "shared-prefix")),
    _Visit("Qwen3-30B-A3B", True, ("decode", "nano-vllm", "shared-prefix")),
)
WITHOUT_GRAPHS = tuple(_Visit(visit.model, False, ("decode",)) for visit in WITH_GRAPHS)


class GpuRun:
    """Measures what the options ask for. What fails costs its own section only."""

    def __init__(self, options: argparse.Namespace, machine: Machine, directory: Path, deadline: Deadline) -> None:
        self._options = options
        self._machine = machine
        self._directory = directory
        self._device = torch.device(options.device)
        self._sizes = GpuSizes.tiny() if options.tiny else GpuSizes()
        self._deadline = deadline

    def measure(self) -> Iterator[GpuResult]:
        """Each figure as it is there."""
        wanted = self._options.sections
        if "parity" in wanted:
            for family, _ in CASES:
                yield from self._guarded("parity", family, None, partial(self._parity, family))
        yield from self._visits(WITH_GRAPHS)
        if "peer" in wanted and PEER_MODEL in self._options.models:
            yield from self._guarded("peer", PEER_MODEL, None, self._peer)
            free_memory(self._device)
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
        elif section == "shared-prefix":
            yield from self._workloads(engine, limits, [shared_prefix_workload(self._sizes)])
        else:
            loads = [nano_vllm_workload(self._sizes, trial) for trial in range(model.num_trials)]
            yield from self._workloads(engine, limits, loads)

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
        return load_random(model, path, self._device, overrides)

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
