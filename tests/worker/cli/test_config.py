"""`millrace config` prints the settings in force, and they are those an engine holds."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engine.loading.quantize import quantise_checkpoint
from settings import load_settings
from tests.support.engines import load_decoder_engine
from tests.support.workers import millrace
from worker.cli import admin


def run_config(*arguments: str) -> Result:
    return CliRunner().invoke(admin.config, list(arguments))


def test_every_setting_has_value_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_ENGINE__MAX_NUM_SEQS", "3")

    rows = json.loads(run_config("--json", "--set", "worker.concurrency=5").stdout)

    assert rows["engine.max_num_seqs"] == {"value": 3, "source": "environment"}
    assert rows["worker.concurrency"] == {"value": 5, "source": "command line"}
    assert rows["engine.kv_cache.block_size"]["source"] == "default"
    assert rows.keys() == {row.key for row in load_settings().rows()}


def test_with_a_model_it_equals_what_the_engine_holds(checkpoint: Path) -> None:
    overrides = {
        "model.path": str(checkpoint),
        "engine.device": "cpu",  # on a GPU the command estimates what the engine measures
        "engine.num_threads": "1",
        "engine.kv_cache.memory_fraction": "0.01",
    }
    arguments = [f"--set={key}={value}" for key, value in overrides.items()]

    shown = json.loads(run_config("--json", *arguments).stdout)

    held = load_decoder_engine(load_settings(overrides)).effective.as_json()
    # How much memory is free changes between two calls, and the pool's size with it.
    assert shown.pop("engine.kv_cache.num_blocks")["source"] == "derived"
    assert held.pop("engine.kv_cache.num_blocks")["source"] == "derived"
    assert shown == held
    assert shown["engine.device"] == {"value": "cpu", "source": "command line"}


def test_the_table_names_value_source_and_what_is_accepted() -> None:
    output = run_config("--set", "log.level=error").stdout

    assert "log.level = error    [command line]" in output
    assert "Accepted: debug, info, warning" in output


def test_a_password_is_never_shown() -> None:
    for flags in ([], ["--json"]):
        assert "hunter2" not in run_config("--set", "redis.url=redis://:hunter2@h/0", *flags).output


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [("MILLRACE_ENGINE__MAX_NUM_SEQ", "3", "MAX_NUM_SEQS"), ("MILLRACE_ENGINE__MAX_NUM_SEQS", "lots", "whole number")],
)
def test_a_wrong_variable_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, named: str
) -> None:
    monkeypatch.setenv(variable, value)

    result = run_config()

    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert all(part in line for part in (variable, value, named))


def test_a_model_that_cannot_be_read_is_exit_1(tmp_path: Path) -> None:
    result = run_config("--model", str(tmp_path))

    assert result.exit_code == 1
    assert "config.json" in result.stderr


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
    assert held["engine.prefix_cache.enabled"]["value"] is engine.model_interface.capabilities().prefix_cache is False
    assert held["engine.device"]["value"] == engine.model_interface.capabilities().device


def test_the_last_line_says_scheme_bytes_and_tokens_of_kv(tiny_model: Path, tmp_path: Path) -> None:
    quantise_checkpoint(tiny_model, tmp_path / "w8a8", "w8a8")
    options = ("--set", "engine.kv_cache.num_blocks=101", "--set", "engine.dtype=float32")

    lines = run_config("--model", str(tmp_path / "w8a8"), *options).stdout.splitlines()

    scheme = "compressed-tensors: int8, one scale a channel, activations int8 a token, the rest float32"
    assert re.search(rf"fit: weights take \d.* in {scheme}; the KV cache of .* holds 1600 tokens", lines[-1])
    assert "fit:" not in run_config().stdout


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
