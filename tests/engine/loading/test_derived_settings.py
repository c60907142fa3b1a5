"""What follows from the device and from other settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.loading import derived_settings
from engine.loading.derived_settings import derive_settings
from settings import Source, load_settings
from tests.support.simulated_memory import simulated_device


@pytest.mark.parametrize(
    ("overrides", "is_ahead", "source"),
    [
        ({"engine.device": "cuda"}, True, Source.DERIVED),
        ({"engine.device": "cuda", "engine.async_scheduling": "off"}, False, Source.COMMAND_LINE),
        ({"engine.device": "cuda", "engine.decode.batched": "off"}, False, Source.DERIVED),
        (
            {"engine.device": "cuda", "engine.decode.batched": "off", "engine.async_scheduling": "on"},
            True,
            Source.COMMAND_LINE,
        ),
        ({"engine.device": "cpu"}, False, Source.DERIVED),
    ],
)
def test_steps_run_ahead_on_a_gpu_that_decodes_in_batches(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, str], is_ahead: bool, source: Source
) -> None:
    monkeypatch.setattr(derived_settings, "operations", lambda _: None)  # of this machine's devices, if it has any
    values = {"model.path": str(tiny_model), **overrides}
    with simulated_device(1 << 24):
        effective = derive_settings(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))
    assert effective.settings.engine.async_scheduling is is_ahead
    assert effective.source_of("engine.async_scheduling") is source
