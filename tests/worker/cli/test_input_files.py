"""The files that a command line names as its input."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.cli.exit_codes import BadUsage
from worker.cli.files import input_files


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("day-10.jsonl", "day-2.jsonl", "other.jsonl", "odd[1].jsonl"):
        Path(name).write_text("{}\n")


def names(*given: str) -> list[str]:
    return [file.name for file in input_files(given)]


def test_files_keep_their_order_and_those_of_a_pattern_are_sorted() -> None:
    assert names("other.jsonl", "day-*.jsonl") == ["other.jsonl", "day-10.jsonl", "day-2.jsonl"]
    assert names("day-?.jsonl", "other.jsonl") == ["day-2.jsonl", "other.jsonl"]


def test_a_pattern_goes_through_directories(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "x.jsonl").write_text("")
    assert names("**/x.jsonl") == ["deep/er/x.jsonl"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file() -> None:
    assert names("odd[1].jsonl") == ["odd[1].jsonl"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["none-*.jsonl"], r"none-\*.jsonl: no file has such a name"),
        (["other.jsonl", "missing.jsonl"], "missing.jsonl: No such file"),
        (["."], r"\.: Is a directory"),
        (["-", "-"], "- is given twice"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_read(given: list[str], message: str) -> None:
    with pytest.raises(BadUsage, match=message) as raised:
        input_files(given)
    assert raised.value.exit_code == 2


def test_a_file_on_disk_is_complete_and_a_pipe_is_not(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert [file.is_complete for file in input_files(["other.jsonl", "pipe"])] == [True, False]


def test_a_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # what Python makes of `<&-`
    with pytest.raises(BadUsage, match="-: standard input is closed; accepted: "):
        input_files(["-"])
