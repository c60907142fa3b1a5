"""Decode graphs without a GPU: steps run over the static buffers, nothing is captured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.execution.decode_graphs import DecodeGraphs, DecodeRun
from engine.kv_cache.tensors import KVCacheTensors
from engine.loading import load as load_decoder_parts
from engine.models.decoder import DecoderModel
from settings import EngineSettings
from tests.support.engines import load_engine


class StaticRun:
    """What stands for a graph: runs the step again, with its own lengths since CPU kernels read those of the host."""

    def __init__(self, runner: StaticRunner, run: DecodeRun) -> None:
        self._runner = runner
        self._run = run

    def __call__(self, kv_lens: tuple[int, ...]) -> None:
        self._runner.replays.append(kv_lens)
        self._run(kv_lens)


class StaticRunner:
    """A GraphBackend that records what is asked of it. `failing`: sizes that cannot be captured."""

    def __init__(self, failing: Collection[int] = ()) -> None:
        self._failing = failing
        self.captures: list[tuple[int, ...]] = []  # the bounds of each attempt
        self.runs: list[StaticRun] = []
        self.replays: list[tuple[int, ...]] = []  # the lengths of each

    @property
    def sizes(self) -> list[int]:
        """Of each replay."""
        return [len(kv_lens) for kv_lens in self.replays]

    def capture(self, run: DecodeRun, kv_len_bounds: tuple[int, ...]) -> DecodeRun:
        self.captures.append(kv_len_bounds)
        if len(kv_len_bounds) in self._failing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        run((1,) * len(kv_len_bounds))  # as the run before a capture: over padding alone
        self.runs.append(StaticRun(self, run))
        return self.runs[-1]


def load_static_engine(
    path: Path,
    backend: StaticRunner,
    overrides: Mapping[str, object] | None = None,
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
) -> Engine:
    """`load_engine` with decode graphs of `backend`."""

    def make(model: DecoderModel, kv_cache: KVCacheTensors, _: EngineSettings, max_model_len: int) -> DecodeGraphs:
        return DecodeGraphs(model, kv_cache, backend, batch_sizes, max_model_len)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_decoder_parts, "make_decode_graphs", make)
        return load_engine(path, overrides)
