"""What `millrace config` can say about the pool before a model is loaded, and which settings size it where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import CapabilityError
from engine.loading import derived_settings
from engine.loading.derived_settings import derive_settings
from engine.loading.kv_pool import expected_step_bytes
from settings import EffectiveSettings, Source, load_settings
from tests.support.engines import load_engine
from tests.support.simulated_memory import simulated_device
from tests.support.tiny_checkpoint import make_checkpoint

MIB = 1 << 20
BLOCKS, LENGTH = "engine.kv_cache.num_blocks", "engine.max_model_len"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def _derive(model: Path, **overrides: str) -> EffectiveSettings:
    named = {f"engine.{name.replace('__', '.')}": value for name, value in overrides.items()}
    values = {"model.path": str(model), "engine.device": "cpu", **named}
    return derive_settings(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))


def test_a_pool_that_will_be_measured_is_called_estimated(model: Path) -> None:
    with simulated_device(8 * MIB):
        effective = _derive(model, max_num_batched_tokens="64")
    assert effective.source_of(BLOCKS) is effective.source_of(LENGTH) is Source.ESTIMATED
    assert 2 < (effective.settings.engine.kv_cache.num_blocks or 0) < 8 * MIB // 4096
    assert effective.as_json()[BLOCKS]["source"] == "estimated"


def test_an_estimate_without_room_refuses_nothing(model: Path) -> None:
    with simulated_device(1024):
        effective = _derive(model, max_model_len="500")
    assert effective.settings.engine.kv_cache.num_blocks == 2
    assert effective.settings.engine.max_model_len == 500


def test_a_pool_that_was_set_is_no_estimate(model: Path) -> None:
    with simulated_device(8 * MIB):
        effective = _derive(model, kv_cache__num_blocks="20")
    assert effective.source_of(BLOCKS) is Source.COMMAND_LINE
    assert (effective.source_of(LENGTH), effective.settings.engine.max_model_len) == (Source.DERIVED, 19 * 16)


def test_a_cpu_refuses_the_gpus_setting(model: Path) -> None:
    with pytest.raises(
        CapabilityError, match=r"engine\.gpu_memory_utilization=0\.8: not on cpu; accepted: not set, or"
    ):
        _derive(model, gpu_memory_utilization="0.8")


def test_a_gpu_refuses_the_cpus_setting(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_settings, "operations", lambda _: None)
    with pytest.raises(CapabilityError, match=r"engine\.kv_cache\.memory_fraction=0\.4: not on cuda; .*utilization"):
        _derive(model, device="cuda", kv_cache__memory_fraction="0.4")


@pytest.mark.parametrize(("seqs", "tokens"), [(2, 700), (32, 32)])
def test_a_steps_memory_is_estimated_within_a_factor_of_two(tmp_path: Path, seqs: int, tokens: int) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1, vocab_size=2000, intermediate_size=256)
    sizes = {"engine.max_num_seqs": str(seqs), "engine.max_num_batched_tokens": str(tokens)}
    with simulated_device(1 << 32):
        engine = load_engine(tmp_path, sizes | {"engine.max_model_len": "720"})
    profile = engine.runner.status().memory_profile
    assert profile is not None
    config = engine.runner._executor.model.config
    assert 0.5 < expected_step_bytes(config, engine.settings.engine) / profile.activations_bytes < 2
