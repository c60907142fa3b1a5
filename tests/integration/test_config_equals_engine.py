"""`millrace config --json` prints what an engine with the same settings holds; a wrong setting stops the program."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from settings import load_settings
from tests.support.engines import load_decoder_engine
from tests.support.millrace import millrace


def test_config_prints_what_the_engine_holds(tiny_model: Path) -> None:
    chosen = {"engine.device": "cpu", "engine.max_num_seqs": "3", "engine.prefix_cache.enabled": "off"}
    options = [f"--set={key}={value}" for key, value in chosen.items()]
    shown = millrace("config", "--json", "--model", tiny_model, *options)
    overrides = {"model.path": str(tiny_model), **chosen}
    engine = load_decoder_engine(load_settings(overrides, environ={}, dotenv_path=Path(os.devnull)))
    held = engine.effective.as_json()
    assert json.loads(shown.stdout) == held
    assert held["engine.kv_cache.num_blocks"]["value"] == engine.stats().num_blocks
    assert held["engine.max_num_seqs"] == {"value": 3, "source": "command line"}
    assert held["engine.prefix_cache.enabled"]["value"] is engine.runner.capabilities().prefix_cache is False
    assert held["engine.device"]["value"] == engine.runner.capabilities().device


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MILLRACE_ENGINE__MAX_NUM_SEQ", "3", "did you mean MILLRACE_ENGINE__MAX_NUM_SEQS?"),
        ("MILLRACE_ENGINE__MAX_NUM_SEQS", "lots", "a whole number, 1 to"),
    ],
)
@pytest.mark.parametrize("command", [["config"], ["jobs"], ["run", "-i", "-", "-o", "-"]])
def test_a_wrong_setting_stops_the_program_with_one_line(
    monkeypatch: pytest.MonkeyPatch, command: list[str], name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    done = millrace(*command)
    assert done.returncode == 2
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert f"{name}={value}" in line
    assert said in line
