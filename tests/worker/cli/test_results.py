"""`millrace results` of a job that runs, and the files that records are written to."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.registry import TestRegistry, must_claim, ok
from worker.cli import files as gzip_output
from worker.cli.exit_codes import BadUsage
from worker.cli.files import RecordPaths, record_output, write_records
from worker.cli.main import cli
from worker.registry.keys import UnitRef

FAILED = 3

GOOD: dict[str, object] = {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
REFUSED: dict[str, object] = {"custom_id": "b", "response": {"status_code": 400, "body": {}}, "error": None}
EXPIRED: dict[str, object] = {"custom_id": "c", "response": None, "error": {"code": "batch_expired"}}
RECORDS = [GOOD, REFUSED, EXPIRED, GOOD]


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


@pytest.mark.parametrize(
    "arguments", [["--cursor", "-1"], ["--cursor", "3-x"], ["--order", "random"], ["--errors-file", "-"]]
)
def test_what_is_not_accepted_is_exit_2(shell: Shell, arguments: list[str]) -> None:
    assert shell(*arguments, exit_code=2).stdout == ""


def test_results_go_to_a_directory_or_to_files_of_their_own(shell: Shell, tmp_path: Path) -> None:
    shell("-o", f"{tmp_path}/out/")
    shell("-o", f"{tmp_path}/good.jsonl.gz", "--errors-file", f"{tmp_path}/bad.jsonl", "--order", "input")

    assert ids((tmp_path / "out" / "output.jsonl").read_bytes()) == [4, 0, 1]
    assert ids((tmp_path / "out" / "errors.jsonl").read_bytes()) == [3]
    assert ids(gzip.decompress((tmp_path / "good.jsonl.gz").read_bytes())) == [0, 1]
    assert (tmp_path / "bad.jsonl").read_bytes() == b""


def written(paths: RecordPaths) -> None:
    with record_output(paths) as write:
        write_records(RECORDS, write)


def read(path: Path) -> list[dict[str, object]]:
    data = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]


def test_one_file_has_all_records_in_their_order(tmp_path: Path) -> None:
    written(RecordPaths.of(str(tmp_path / "all.jsonl")))
    assert read(tmp_path / "all.jsonl") == RECORDS


@pytest.mark.parametrize("name", ["new/deep/", "there"])
def test_a_directory_gets_both_files_and_is_made_if_need_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    written(RecordPaths.of(f"{tmp_path}/{name}"))
    assert read(tmp_path / name / "output.jsonl") == [GOOD, GOOD]
    assert read(tmp_path / name / "errors.jsonl") == [REFUSED, EXPIRED]


def test_errors_may_have_a_file_of_their_own_and_either_may_be_compressed(tmp_path: Path) -> None:
    written(RecordPaths.of(str(tmp_path / "good.jsonl.gz"), str(tmp_path / "bad.jsonl")))
    assert read(tmp_path / "good.jsonl.gz") == [GOOD, GOOD]
    assert read(tmp_path / "bad.jsonl") == [REFUSED, EXPIRED]


def test_paths_that_cannot_be_had_are_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for output, errors in (("-", "-"), (f"{tmp_path}/x", f"{tmp_path}/./x"), (f"{tmp_path}/file/", None)):
        with pytest.raises(BadUsage):
            RecordPaths.of(output, errors)
    for paths in (RecordPaths(f"{tmp_path}/none/x", None), RecordPaths(f"{tmp_path}/x", f"{tmp_path}/none/x")):
        with pytest.raises(BadUsage, match="none/x: No such file"), record_output(paths):
            pass
    assert (tmp_path / "file").read_text() == "kept"


def test_a_compressed_file_can_be_read_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gzip_output, "FLUSH_EVERY_S", 0.0)
    path = tmp_path / "out.gz"
    with record_output(RecordPaths(str(path), None)) as write:
        write(GOOD)
        so_far = zlib.decompressobj(wbits=31).decompress(path.read_bytes())
        assert json.loads(so_far) == GOOD


def test_records_are_not_flushed_one_by_one_into_a_compressed_file(tmp_path: Path) -> None:
    path, count = tmp_path / "out.gz", 1000
    with record_output(RecordPaths(str(path), None)) as write:
        for _ in range(count):
            write(GOOD)
    assert len(read(path)) == count
    # Flushed after each record it would be some 20 bytes a record: 20,000.
    assert os.path.getsize(path) < 4000
