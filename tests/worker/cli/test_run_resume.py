"""`millrace run` beside the records of an earlier run: refused, resumed, replaced, or only what failed run again."""

from __future__ import annotations

import gzip
import json
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.processes import wait_until, warm_interpreter
from tests.support.request_lines import batch_line, completion_line
from tests.support.workers import CLI, ONE_THREAD, millrace
from worker.cli.exit_codes import ExitCode
from worker.cli.kept_records import hold_output
from worker.cli.run import run

ENGINE = ["--set", "engine.deterministic=true", "--set", "engine.prefix_cache.enabled=false"]
ONCE, AGAIN = (
    completion_line(prompt=prompt, custom_id="same", max_tokens=2, temperature=0) for prompt in ("once", "again")
)
NO_ID = batch_line("/v1/completions", {"prompt": "who"}, custom_id=None)
LINES = (
    *(completion_line(prompt=f"question {number}", max_tokens=3, temperature=0) for number in range(4)),
    ONCE,
    completion_line(temperature="hot"),
    AGAIN,
    NO_ID,
    b"{bad",
)
ANSWERED, FAILED = (0, 1, 2, 3, 4), (5, 6, 7, 8)


def index_of(record: Mapping[str, Any]) -> int:
    return int(record["id"].rpartition("_")[2])


def without_time(records: bytes) -> list[bytes]:
    """The records' lines in one order, less the second in which their run began."""
    return sorted(re.sub(rb'"created":[0-9]+', b'"created":0', records).splitlines())


@dataclass(frozen=True)
class Place:
    """A directory with an input, and what an undisturbed run writes of it."""

    path: Path
    model: Path
    undisturbed: bytes

    @property
    def output(self) -> Path:
        return self.path / "out.jsonl"

    def run(self, *options: str, lines: Sequence[bytes] = LINES, output: Path | None = None) -> Result:
        (self.path / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        files = ["-i", str(self.path / "in.jsonl"), "-o", str(output or self.output)]
        return CliRunner().invoke(run, [*files, "--model", str(self.model), *ENGINE, *options])

    def left_by_a_kill(self, *, num_records: int, piece: bytes = b"") -> bytes:
        """Leave so many records in the output, and a piece behind them; the records."""
        records = b"".join(self.undisturbed.splitlines(keepends=True)[:num_records])
        self.output.write_bytes(records + piece)
        return records


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = Place(tmp_path_factory.mktemp("undisturbed"), checkpoint, b"")
    done = place.run()
    assert done.exit_code == 0, done.output
    return place.output.read_bytes()


@pytest.fixture
def place(tmp_path: Path, checkpoint: Path, undisturbed: bytes) -> Place:
    return Place(tmp_path, checkpoint, undisturbed)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test."""
    monkeypatch.setattr("engine.loading.load.load_engine", lambda *_: pytest.fail("a model is loaded"))


def test_each_line_has_a_record_that_names_the_input_and_the_line(undisturbed: bytes) -> None:
    records = [json.loads(line) for line in undisturbed.splitlines()]

    assert {index_of(record): record["response"]["status_code"] for record in records} == {
        **dict.fromkeys(ANSWERED, 200),
        **dict.fromkeys(FAILED, 400),
    }
    [run_id] = {record["id"].removeprefix("batch_req_").rpartition("_")[0] for record in records}
    assert re.fullmatch(r"run-[0-9a-f]{16}", run_id)


@pytest.mark.usefixtures("no_model")
def test_an_output_with_records_is_refused_and_the_ways_on_are_named(place: Place) -> None:
    records = place.left_by_a_kill(num_records=3)

    done = place.run()

    assert done.exit_code == 2
    assert "out.jsonl holds the records of an earlier run; accepted: --resume" in done.stderr
    assert "--overwrite" in done.stderr
    assert place.output.read_bytes() == records


def test_an_output_without_records_is_no_reason_to_refuse(place: Place) -> None:
    place.output.touch()

    assert place.run().exit_code == 0
    assert without_time(place.output.read_bytes()) == without_time(place.undisturbed)


def test_overwriting_says_what_is_replaced_and_replaces_it(place: Place) -> None:
    place.left_by_a_kill(num_records=3, piece=b"{")

    done = place.run("--overwrite")

    assert done.exit_code == 0, done.output
    assert re.search(
        r"out\.jsonl \([0-9,]+ bytes, last written 2.* UTC\) is replaced as soon as the model", done.stderr
    )
    assert without_time(place.output.read_bytes()) == without_time(place.undisturbed)


@pytest.mark.parametrize("num_records", [0, 1, 4, 8])
def test_a_resumed_run_adds_the_records_that_are_missing(place: Place, num_records: int) -> None:
    kept = place.left_by_a_kill(num_records=num_records)

    done = place.run("--resume")

    assert done.exit_code == 0, done.output
    assert f"{num_records} records are kept, {9 - num_records} of 9 lines are to be run" in done.stderr
    assert place.output.read_bytes().startswith(kept)
    assert without_time(place.output.read_bytes()) == without_time(place.undisturbed)


def test_all_records_of_an_output_are_of_one_second(place: Place) -> None:
    [*_, answer] = [line for line in place.undisturbed.splitlines(keepends=True) if b'"created"' in line]
    place.output.write_bytes(re.sub(rb'"created":[0-9]+', b'"created":1234', answer))

    assert place.run("--resume").exit_code == 0

    assert set(re.findall(rb'"created":([0-9]+)', place.output.read_bytes())) == {b"1234"}


def test_a_run_without_an_output_resumes_from_the_beginning(place: Place) -> None:
    assert place.run("--resume").exit_code == 0
    assert without_time(place.output.read_bytes()) == without_time(place.undisturbed)


@pytest.mark.usefixtures("no_model")
def test_where_nothing_is_left_no_model_is_loaded(place: Place) -> None:
    place.left_by_a_kill(num_records=9)

    done = place.run("--resume")

    assert done.exit_code == 0, done.output
    assert "9 records are kept, 0 of 9 lines are to be run" in done.stderr
    assert place.output.read_bytes() == place.undisturbed


@pytest.mark.parametrize("piece", [b"{", b'{"id":"batch_req_run', b"\0\0\0\0", b'"text"'])
def test_a_record_that_is_cut_off_is_taken_out_and_its_line_runs(place: Place, piece: bytes) -> None:
    kept = place.left_by_a_kill(num_records=4, piece=piece)

    done = place.run("--resume")

    assert "out.jsonl: its last record is cut off and is taken out; its line runs again" in done.stderr
    assert place.output.read_bytes().startswith(kept)
    assert without_time(place.output.read_bytes()) == without_time(place.undisturbed)


def test_a_whole_record_without_its_line_end_is_kept(place: Place) -> None:
    kept = place.left_by_a_kill(num_records=4)[:-1]
    place.output.write_bytes(kept)

    done = place.run("--resume")

    assert "4 records are kept" in done.stderr
    assert "cut off" not in done.stderr
    assert place.output.read_bytes().startswith(kept + b"\n")
    assert without_time(place.output.read_bytes()) == without_time(place.undisturbed)


@pytest.mark.parametrize("cut", [0, 1, 8, 30])
def test_a_compressed_output_is_resumed_wherever_it_was_cut(place: Place, cut: int) -> None:
    kept, output = place.left_by_a_kill(num_records=4), place.path / "out.jsonl.gz"
    packed = gzip.compress(kept)
    output.write_bytes(packed[: len(packed) - cut])

    done = place.run("--resume", output=output)

    assert done.exit_code == 0, done.output
    assert without_time(gzip.decompress(output.read_bytes())) == without_time(place.undisturbed)
    assert sorted(path.name for path in place.path.iterdir() if "gz" in path.name) == ["out.jsonl.gz"]


@pytest.mark.parametrize("num_records", [0, 1, 8])
def test_both_files_of_a_directory_are_resumed(place: Place, num_records: int) -> None:
    output = place.path / "out"
    output.mkdir()
    for line in place.undisturbed.splitlines(keepends=True)[:num_records]:
        name = "output" if b'"status_code":200' in line else "errors"
        with (output / f"{name}.jsonl").open("ab") as file:
            file.write(line)

    assert place.run("--resume", output=output).exit_code == 0

    found = [(output / name).read_bytes() for name in ("output.jsonl", "errors.jsonl")]
    assert without_time(b"".join(found)) == without_time(place.undisturbed)
    assert [data.count(b"\n") for data in found] == [len(ANSWERED), len(FAILED)]


def test_the_same_lines_however_packed_are_the_same_input(place: Place) -> None:
    place.left_by_a_kill(num_records=4)
    (place.path / "a.gz").write_bytes(gzip.compress(b"\r\n\n".join(LINES[:5])))
    (place.path / "b").write_bytes(b"\n".join(LINES[5:]))
    inputs = ["-i", str(place.path / "a.gz"), "-i", str(place.path / "b"), "-o", str(place.output)]

    done = CliRunner().invoke(run, [*inputs, "--resume", "--model", str(place.model), *ENGINE])

    assert done.exit_code == 0, done.output
    assert without_time(place.output.read_bytes()) == without_time(place.undisturbed)


def test_lines_are_told_by_their_bytes_with_what_is_ignored_of_them(place: Place) -> None:
    lines = [completion_line(prompt=f"question {number}", max_tokens=1, best_of=2) for number in range(2)]
    assert place.run(lines=lines).exit_code == 1  # all of them failed
    failed, again = place.output, place.path / "again.jsonl"

    done = place.run("--retry", str(failed), "--ignore-param", "best_of", lines=lines, output=again)
    resumed = place.run("--resume", "--ignore-param", "best_of", lines=lines, output=again)

    assert done.exit_code == 0, done.output
    assert "ignored best_of in 2 lines" in done.stderr
    assert again.read_bytes().count(b'"status_code":200') == 2
    assert "2 records are kept, 0 of 2 lines are to be run" in resumed.stderr


def test_of_a_resumed_run_all_records_count_for_whether_all_failed(place: Place) -> None:
    answers = [line for line in place.undisturbed.splitlines(keepends=True) if b'"status_code":200' in line]
    place.output.write_bytes(b"".join(answers))

    done = place.run("--resume", "--max-failed", "3")

    assert done.exit_code == 1
    assert "run: 4 of 9 requests failed; accepted: at most 3 (--max-failed)" in done.stderr


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("lines", [LINES[:-1], LINES[1:], (*LINES, ONCE), (LINES[1], LINES[0], *LINES[2:])])
@pytest.mark.parametrize("option", ["--resume", "--retry"])
def test_records_of_another_input_are_refused(place: Place, lines: Sequence[bytes], option: str) -> None:
    left = place.left_by_a_kill(num_records=4, piece=b"{") + b"{"

    if option == "--resume":
        done = place.run("--resume", lines=lines)
    else:
        done = place.run("--retry", str(place.output), lines=lines, output=place.path / "again.jsonl")

    assert done.exit_code == 2
    assert "out.jsonl: line 1 is the record of another input: the request lines, or limits.max_prompt" in done.stderr
    assert place.output.read_bytes() == left


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"no JSON", "line 3 is no record"), (b"[]", "line 3 is no record"), (b"{}", "line 3 is no record"),
        (b'{"id":"batch_req_s0-7_0"}', "line 3 is no record"),
        (b'{"id":"batch_req_run_0"}', "line 3 is the record of an input that cannot be told from others"),
    ],
)  # fmt: skip
def test_what_no_run_of_this_input_wrote_is_refused_by_its_line(place: Place, line: bytes, fault: str) -> None:
    place.left_by_a_kill(num_records=2, piece=line + b"\n")

    done = place.run("--resume")

    assert done.exit_code == 2
    assert f"out.jsonl: {fault}" in done.stderr


@pytest.mark.usefixtures("no_model")
def test_answers_of_another_model_are_not_added_to(place: Place) -> None:
    left = place.left_by_a_kill(num_records=8)

    done = place.run("--resume", "--set", "model.name=other")

    assert done.exit_code == 2
    assert "out.jsonl has answers of model 'tiny', not of 'other'; accepted: the same model" in done.stderr
    assert place.output.read_bytes() == left


@pytest.mark.usefixtures("no_model")
def test_broken_gzip_of_an_output_is_refused(place: Place) -> None:
    output = place.path / "out.gz"
    output.write_bytes(gzip.compress(place.undisturbed)[:30] + b"\0" * 500)

    done = place.run("--resume", output=output)

    assert done.exit_code == 2
    assert "out.gz: its gzip data is broken" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["-i", "-", "-o", "out", "--resume"], "--resume: input - cannot be read a second time; accepted: files"),
        (["-i", "-", "-o", "out", "--retry", "old"], "--retry: input - cannot be read a second time"),
        (["-i", "in", "-o", "-", "--resume"], "--resume: output - cannot be read again"),
        (["-i", "in", "-o", "/dev/null", "--resume"], "--resume: output /dev/null cannot be read again"),
        (["-i", "in", "-o", "out", "--resume", "--overwrite"], "--resume keeps the records that --overwrite replaces"),
        (["-i", "in", "-o", "old", "--retry", "old"], "old is also the file of --retry; accepted: another file"),
        (["-i", "in", "-o", "out", "--retry", "none"], "none: No such file"),
        (["-i", "in", "-o", "out", "--retry", "."], "has neither output.jsonl nor errors.jsonl"),
    ],
)
def test_what_cannot_be_resumed_or_retried_is_exit_2(arguments: Sequence[str], fault: str) -> None:
    for name in ("in", "old"):
        Path(name).write_bytes(b"")

    done = millrace("run", *arguments)

    assert (done.returncode, done.stdout) == (2, b""), done.stderr
    assert fault in done.stderr.decode()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("options", [[], ["--resume"], ["--overwrite"]])
def test_no_second_run_writes_to_an_output(place: Place, options: Sequence[str]) -> None:
    with ExitStack() as held:
        hold_output(str(place.output), held)

        done = place.run(*options)

    assert done.exit_code == 2
    assert "out.jsonl: another run is writing to it; accepted: another file, or wait for its end" in done.stderr


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_retry_runs_the_lines_that_failed_and_no_others(place: Place, is_directory: bool) -> None:
    earlier, again = place.path / "earlier", place.path / "again.jsonl"
    if is_directory:
        earlier.mkdir()
    (earlier / "errors.jsonl" if is_directory else earlier).write_bytes(place.undisturbed)

    done = place.run("--retry", str(earlier), output=again)

    assert done.exit_code == 1, done.output  # all of them failed again
    assert "earlier: 4 lines failed and are to be run again" in done.stderr
    failed = [line for line in place.undisturbed.splitlines() if index_of(json.loads(line)) in FAILED]
    assert without_time(again.read_bytes()) == without_time(b"\n".join(failed))


def test_a_retry_is_resumed_as_any_run(place: Place) -> None:
    failed = [line for line in place.undisturbed.splitlines() if index_of(json.loads(line)) in FAILED]
    earlier = place.path / "earlier.jsonl"
    earlier.write_bytes(place.undisturbed)
    place.output.write_bytes(failed[0] + b"\n")

    done = place.run("--retry", str(earlier), "--resume")

    assert "1 records are kept, 3 of 9 lines are to be run" in done.stderr
    assert without_time(place.output.read_bytes()) == without_time(b"\n".join(failed))


@pytest.mark.usefixtures("no_model")
def test_a_retry_of_a_run_in_which_nothing_failed_is_done(place: Place) -> None:
    answered = [line for line in place.undisturbed.splitlines() if index_of(json.loads(line)) in ANSWERED]
    earlier = place.path / "earlier.jsonl"
    earlier.write_bytes(b"\n".join(answered))

    done = place.run("--retry", str(earlier))

    assert done.exit_code == 0, done.output
    assert "earlier.jsonl: 0 lines failed" in done.stderr
    assert place.output.read_bytes() == b""


@pytest.mark.parametrize(("output", "says_how"), [("out.jsonl", True), ("-", False)])
def test_ctrl_c_says_how_to_go_on_where_records_are_kept(
    tiny_model: Path, tmp_path: Path, output: str, says_how: bool
) -> None:
    requests, log, records = tmp_path / "in.jsonl", tmp_path / "log", tmp_path / "out.jsonl"
    long = {"max_tokens": 100, "ignore_eos": True}
    requests.write_bytes(b"\n".join(completion_line(prompt=f"{n}", custom_id=f"{n}", **long) for n in range(400)))
    target = output if output == "-" else str(records)
    options = ["-o", target, "--model", str(tiny_model), "--set", "engine.max_num_seqs=1", *ONE_THREAD]
    with log.open("wb") as errors, (records if output == "-" else tmp_path / "none").open("wb") as stdout:
        process = warm_interpreter().start(CLI, ["run", str(requests), *options], stdout, stderr=errors)
        wait_until(
            lambda: (records.exists() and records.stat().st_size > 0) or process.poll() is not None, timeout_s=120
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == ExitCode.INTERRUPTED
    assert ("interrupted; the same command with --resume goes on" in log.read_text()) is says_how
    assert 0 < len(records.read_bytes().splitlines()) < 400
