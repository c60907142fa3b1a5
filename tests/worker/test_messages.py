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
from tests.support.registry import TestRegistry
from worker.cli.main import cli
from worker.lines.errors import LineError
from worker.lines.files import FileChecks
from worker.lines.parse import parse_request_line
from worker.registry.errors import InvalidOption
from worker.registry.intake import checked_options
from worker.registry.models import Announcement, ServedModels
from worker.runtime.planner import JobLines

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


def told_of_job(case: dict[str, Any]) -> None:
    lines = JobLines(ServedModels(served(case)), FileChecks(endpoint=None, is_strict=False), case.get("model"))
    if lines.error is not None:
        raise lines.error
    lines.add(parse_request_line(case["given"].encode(), 0, LimitSettings()))


def served(case: dict[str, Any]) -> list[Announcement]:
    return [Announcement(name=name, aliases=tuple(aliases)) for name, aliases in case["served"].items()]


TOLD = {
    "line": told_of_line,
    "option": told_of_option,
    "setting": told_of_setting,
    "model": told_of_model,
    "job": told_of_job,
}


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
    safe = ("--set", "redis.allow_unsafe=true")  # without the warning that this Redis keeps nothing
    options = ("--redis-url", redis_url, *safe, "--set", "limits.max_prompts_per_job=3")

    done = CliRunner().invoke(cli, ["submit", "in.jsonl", *options])

    assert (done.exit_code, done.stderr) == (2, f"millrace: {case['said']}\n")


@pytest.mark.parametrize("case", TABLE["worker"], ids=lambda case: case["said"][:40])
def test_a_worker_of_another_model_is_refused_in_these_words(case: dict[str, Any], redis_url: str) -> None:
    registry = TestRegistry.at(redis_url)
    for announcement in served(case):
        registry.directory("box-1").announce(announcement)

    with pytest.raises(SettingsError) as refused:
        registry.directory("box-2").check(Announcement.model_validate(case["given"]))

    assert str(refused.value) == case["said"]


def test_the_table_has_sixty_mistakes_each_told_in_one_line() -> None:
    assert len(CASES) >= 60
    assert not [case["said"] for _, case in CASES if "\n" in case["said"] or "pydantic" in case["said"]]
