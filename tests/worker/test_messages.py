"""What a user is told for each mistake of a table, messages.toml, word for word."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine.checkpoint.files import check_is_checkpoint
from engine.checkpoint.model_config import read_config
from engine.errors import CheckpointError
from settings import LimitSettings, SettingsError, load_settings, parse_assignments
from worker.cli.main import cli
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line
from worker.registry.errors import InvalidOption
from worker.registry.intake import checked_options

TABLE: dict[str, list[dict[str, Any]]] = tomllib.loads(Path(__file__).with_name("messages.toml").read_text())
CASES = [(kind, case) for kind, cases in TABLE.items() for case in cases]


def told_of_line(case: dict[str, Any]) -> None:
    parse_request_line(case["given"].encode(), 0, LimitSettings())


def told_of_option(case: dict[str, Any]) -> None:
    checked_options(case["given"])


def told_of_setting(case: dict[str, Any]) -> None:
    load_settings(parse_assignments([case["given"]]), environ={})


def told_of_model(case: dict[str, Any]) -> None:
    for name, content in case.get("files", {}).items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    directory = Path(case["given"])
    check_is_checkpoint(directory, directory)
    read_config(directory)


TOLD = {"line": told_of_line, "option": told_of_option, "setting": told_of_setting, "model": told_of_model}


@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, case) for kind, case in CASES if kind in TOLD],
    ids=lambda part: part if isinstance(part, str) else str(part["given"])[:60],
)
def test_a_mistake_is_told_in_these_words(
    kind: str, case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = "accepted"

    try:
        TOLD[kind](case)
    except (LineError, InvalidOption, SettingsError, CheckpointError) as error:
        said = str(error)

    assert said == case["said"]


@pytest.mark.parametrize("case", TABLE["file"], ids=lambda case: case["said"][:40])
def test_a_wrong_file_is_told_in_these_words(
    case: dict[str, Any], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(case["content"])
    options = ("--redis-url", redis_url, "--set", "limits.max_prompts_per_job=3")

    done = CliRunner().invoke(cli, ["submit", "in.jsonl", *options])

    assert (done.exit_code, done.stderr) == (2, f"millrace: {case['said']}\n")


def test_the_table_has_sixty_mistakes_each_told_in_one_line() -> None:
    assert len(CASES) >= 60
    assert not [case["said"] for _, case in CASES if "\n" in case["said"] or "pydantic" in case["said"]]
