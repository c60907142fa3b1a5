from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from settings import load_settings
from tests.support.engines import load_decoder_engine
from worker.cli import admin


def config(*arguments: str) -> Result:
    return CliRunner().invoke(admin.config, list(arguments))


def test_every_setting_has_value_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_ENGINE__MAX_NUM_SEQS", "3")

    rows = json.loads(config("--json", "--set", "worker.concurrency=5").stdout)

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

    shown = json.loads(config("--json", *arguments).stdout)

    held = load_decoder_engine(load_settings(overrides)).effective.as_json()
    # How much memory is free changes between two calls, and the pool's size with it.
    assert shown.pop("engine.kv_cache.num_blocks")["source"] == "derived"
    assert held.pop("engine.kv_cache.num_blocks")["source"] == "derived"
    assert shown == held
    assert shown["engine.device"] == {"value": "cpu", "source": "command line"}


def test_the_table_names_value_source_and_what_is_accepted() -> None:
    output = config("--set", "log.level=error").stdout

    assert "log.level = error    [command line]" in output
    assert "Accepted: debug, info, warning" in output


def test_a_password_is_never_shown() -> None:
    for flags in ([], ["--json"]):
        assert "hunter2" not in config("--set", "redis.url=redis://:hunter2@h/0", *flags).output


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [("MILLRACE_ENGINE__MAX_NUM_SEQ", "3", "MAX_NUM_SEQS"), ("MILLRACE_ENGINE__MAX_NUM_SEQS", "lots", "whole number")],
)
def test_a_wrong_variable_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, named: str
) -> None:
    monkeypatch.setenv(variable, value)

    result = config()

    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert all(part in line for part in (variable, value, named))


def test_a_model_that_cannot_be_read_is_exit_1(tmp_path: Path) -> None:
    result = config("--model", str(tmp_path))

    assert result.exit_code == 1
    assert "config.json" in result.stderr
