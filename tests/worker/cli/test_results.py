"""`millrace results`: orders, cursors and files, of a job that runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.registry import TestRegistry, must_claim, ok
from worker.cli.main import cli
from worker.registry.keys import UnitRef

FAILED = 3


def record(index: int) -> str:
    return json.dumps({"custom_id": str(index), "response": {"status_code": 500 if index == FAILED else 200}})


class Shell:
    """`results` of a job of five lines whose records came in the order 4, 0, 3, 1."""

    def __init__(self, registry: TestRegistry) -> None:
        self.registry = registry
        self.job_id = registry.running_job(range(5))
        leases = registry.leases()
        written = [ok(index, record(index)) for index in (4, 0, 3, 1)]
        leases.put(must_claim(leases, UnitRef.shard(self.job_id, 0)), written)

    def __call__(self, *arguments: str, exit_code: int = 0) -> Result:
        url = self.registry.settings.url.get_secret_value()
        done = CliRunner().invoke(cli, ["results", self.job_id, *arguments, "--redis-url", url])
        assert done.exit_code == exit_code, done.output
        return done

    def ids(self, *arguments: str) -> list[int]:
        return ids(self(*arguments).stdout_bytes)


def ids(lines: bytes) -> list[int]:
    found: list[dict[str, Any]] = [json.loads(line) for line in lines.splitlines()]
    return [int(entry["custom_id"]) for entry in found]


@pytest.fixture
def shell(redis_url: str) -> Shell:
    return Shell(TestRegistry.at(redis_url))


def test_records_come_as_written_or_as_the_lines_stood_from_a_cursor_on(shell: Shell) -> None:
    assert shell.ids() == [4, 0, 3, 1]
    assert shell.ids("--cursor", "3") == [1]
    assert shell.ids("--order", "input") == [0, 1]
    assert shell.ids("--order", "input", "--cursor", "3") == [3, 4]


@pytest.mark.parametrize("arguments", [["--cursor", "-1"], ["--order", "random"], ["--errors-file", "-"]])
def test_what_is_not_accepted_is_exit_2(shell: Shell, arguments: list[str]) -> None:
    assert shell(*arguments, exit_code=2).stdout == ""


def test_results_go_to_a_directory_or_to_files_of_their_own(shell: Shell, tmp_path: Path) -> None:
    shell("-o", f"{tmp_path}/out/")
    shell("-o", f"{tmp_path}/good.jsonl.gz", "--errors-file", f"{tmp_path}/bad.jsonl", "--order", "input")

    assert ids((tmp_path / "out" / "output.jsonl").read_bytes()) == [4, 0, 1]
    assert ids((tmp_path / "out" / "errors.jsonl").read_bytes()) == [3]
    assert ids(gzip.decompress((tmp_path / "good.jsonl.gz").read_bytes())) == [0, 1]
    assert (tmp_path / "bad.jsonl").read_bytes() == b""
