"""Which graphs the settings ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.execution import decode_graphs as module
from engine.execution.decode_graphs import make_decode_graphs
from settings import CudaGraphSettings, EngineSettings
from tests.support.engines import load_engine
from tests.support.static_runner import StaticRunner


def test_the_sizes_are_those_set_or_the_usual_ones_and_off_means_none(
    moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = load_engine(moe_checkpoint)._executor
    model, kv_cache = executor.model, executor.kv_cache

    def sizes(**options: object) -> list[int] | None:
        backend = StaticRunner()
        monkeypatch.setattr(module, "CudaGraphBackend", lambda _: backend)
        settings = EngineSettings(max_num_seqs=4, cuda_graphs=CudaGraphSettings.model_validate(options))
        graphs = make_decode_graphs(model, kv_cache, settings, 64)
        if graphs is None:
            return None
        graphs.capture_all()
        return [len(bounds) for bounds in backend.captures]

    assert sizes(enabled=True) == [4, 2, 1]
    assert sizes(enabled=True, batch_sizes="1,3") == [3, 1]
    assert sizes(enabled=False, batch_sizes="1,3") is None
    assert sizes() is None
    model = replace(model, lm_head=None)
    assert sizes(enabled=True) is None


def test_on_a_cpu_none_are_made(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    assert engine.settings.engine.cuda_graphs.enabled is False
    assert engine.runner.status().decode_graphs is None
    assert not engine.runner.capabilities().cuda_graphs
