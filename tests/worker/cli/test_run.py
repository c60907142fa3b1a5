"""`millrace run` as a process, on a small checkpoint."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from engine.execution.batch import ForwardItem
from engine.execution.forward import StepExecutor
from engine.models.decoder import ForwardResult
from tests.support.processes import WarmProcess, wait_until, warm_interpreter
from tests.support.request_lines import chat_line, completion_line, raw_line
from tests.support.workers import CLI, millrace
from worker.cli.run import run


def records_of(data: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in data.splitlines()]


def test_a_pipe_in_gives_records_out_and_nothing_else(checkpoint: Path) -> None:
    lines = [completion_line(max_tokens=2), chat_line(max_tokens=2), b"", b"bad", raw_line({"prompt": [9999]})]

    done = millrace("run", "-i", "-", "-o", "-", "--model", checkpoint, stdin=b"\n".join(lines))

    assert done.returncode == 0, done.stderr
    records = records_of(done.stdout)
    codes = {record["custom_id"]: record["response"]["status_code"] for record in records}  # type: ignore[index]  # JSON
    assert codes == {"line-1": 200, "line-2": 200, None: 400, "line-4": 400}


def test_the_summary_has_the_figures_of_the_run(checkpoint: Path, tmp_path: Path) -> None:
    requests, results, summary = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "summary.json"
    requests.write_bytes(b"\n".join([completion_line(max_tokens=3, ignore_eos=True), b"bad"]))
    results.write_text("an older run's results, which are replaced\n")

    done = millrace("run", "-i", requests, "-o", results, "--overwrite", "--model", checkpoint, "--summary", summary)

    assert done.returncode == 0, done.stderr
    assert b"out.jsonl (43 bytes, last written 2" in done.stderr
    assert len(records_of(results.read_bytes())) == 2
    figures = json.loads(summary.read_text())
    assert figures.keys() == {
        "load_s", "elapsed_s", "requests", "failed", "prompt_tokens", "cached_tokens", "output_tokens",
        "ignored_params", "errors",
    }  # fmt: skip
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (2, 1, 3)
    assert figures["errors"] == {"invalid_json_line": 1}
    assert done.stderr.decode().splitlines()[-3].startswith("2 done: 1 completed, 1 failed, 3 tokens out")


def test_the_failed_requests_are_summed_up_with_what_shows_them(checkpoint: Path, tmp_path: Path) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(b"\n".join([completion_line(max_tokens=1), b"bad", b"worse", completion_line(n=0)]))

    done = millrace("run", requests, "-o", results, "--model", checkpoint)

    assert done.returncode == 0, done.stderr
    head, *by_code = done.stderr.decode().splitlines()[-3:]
    assert head.startswith("3 of 4 requests failed; ")
    assert [line.split()[:2] for line in by_code] == [["2", "invalid_json_line"], ["1", "invalid_value"]]
    command = head.removeprefix("3 of 4 requests failed; ").removesuffix(" shows them:")
    shown = subprocess.run(command, shell=True, capture_output=True, check=True).stdout
    assert sorted(error["line"] for error in map(error_of_record, records_of(shown))) == [2, 3, 4]


def error_of_record(record: dict[str, Any]) -> dict[str, Any]:
    return dict(record["response"]["body"]["error"])


def test_a_run_of_which_every_line_failed_is_exit_1(checkpoint: Path) -> None:
    done = millrace("run", "-", "-o", "-", "--model", checkpoint, stdin=b"bad\nworse")

    assert done.returncode == 1
    assert len(records_of(done.stdout)) == 2
    assert done.stderr.splitlines()[-1] == b"millrace: run: all 2 requests failed"


@pytest.mark.parametrize(("most", "code"), [("1", 0), ("50%", 0), ("0", 1), ("49.9%", 1)])
def test_how_many_may_fail_is_the_callers_to_say(checkpoint: Path, most: str, code: int) -> None:
    lines = b"\n".join([completion_line(max_tokens=1), b"bad"])

    done = millrace("run", "-", "-o", "-", "--model", checkpoint, "--max-failed", most, stdin=lines)

    assert done.returncode == code
    assert (b"1 of 2 requests failed; accepted: at most" in done.stderr) is (code == 1)


def test_the_figures_are_printed_as_json_beside_the_records(checkpoint: Path, tmp_path: Path) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_bytes(b"\xef\xbb\xbf" + completion_line(max_tokens=1))

    to_file = millrace("run", requests, "-o", tmp_path / "out.jsonl", "--model", checkpoint, "--json")
    to_stdout = millrace("run", requests, "-o", "-", "--model", checkpoint, "--json")

    assert json.loads(to_file.stdout)["requests"] == 1
    assert json.loads(to_stdout.stderr.splitlines()[-1])["failed"] == 0
    assert len(records_of(to_stdout.stdout)) == 1


def test_what_is_no_file_of_lines_is_exit_2_before_the_model_loads(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((64).to_bytes(8, "little") + b'{"a": {"dtype": "F32"}}')

    done = CliRunner().invoke(run, [f"{tmp_path}/model.safetensors", "-o", "-", "--model", "none"])

    assert done.exit_code == 2
    assert "model.safetensors: it is a safetensors file" in done.stderr


def test_settings_reach_the_engine(checkpoint: Path) -> None:
    arguments = (
        "run",
        "-i",
        "-",
        "-o",
        "-",
        "--model",
        checkpoint,
        "--set",
        "engine.max_model_len=16",
        "--set",
        "model.name=m",
    )

    done = millrace(*arguments, stdin=raw_line({"prompt": [1] * 16, "model": "m"}))

    assert done.returncode == 1, done.stderr  # all of one line
    [record] = records_of(done.stdout)
    assert record["response"]["body"]["error"]["code"] == "context_length_exceeded"  # type: ignore[index]  # JSON


def test_a_model_that_cannot_be_had_is_one_line_and_exit_1(tmp_path: Path) -> None:
    for arguments in (["--model", str(tmp_path)], []):
        done = millrace("run", "-i", "-", "-o", "-", *arguments)

        assert done.returncode == 1
        assert done.stderr.startswith(b"millrace: ")
        assert len(done.stderr.splitlines()) == 1


def test_a_model_that_does_not_load_leaves_the_last_results_as_they_are(tmp_path: Path) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out"
    requests.write_bytes(completion_line())
    results.mkdir()
    for name in ("output.jsonl", "errors.jsonl"):
        (results / name).write_text("an older run's results")

    arguments = ["-i", str(requests), "-o", str(results), "--overwrite", "--model", str(tmp_path / "none")]
    done = CliRunner().invoke(run, arguments)

    assert done.exit_code == 1, done.output
    assert "none" in done.stderr
    assert [file.read_text() for file in sorted(results.iterdir())] == ["an older run's results"] * 2


def test_an_interrupt_while_the_model_loads_keeps_the_last_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(completion_line())
    results.write_text("an older run's results")

    def load(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the interrupt has to wait for the model")

    monkeypatch.setattr("engine.loading.load.load_engine", load)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = CliRunner().invoke(run, ["-i", str(requests), "-o", str(results), "--overwrite"])
    finally:
        signal.signal(signal.SIGINT, handler)

    assert "Aborted" in done.output  # by click; `main` makes 130 of it
    assert results.read_text() == "an older run's results"


def test_an_output_that_cannot_be_written_is_exit_2_before_the_model_loads(tmp_path: Path) -> None:
    requests, nowhere = tmp_path / "in.jsonl", tmp_path / "none" / "out.jsonl"
    requests.write_bytes(completion_line())

    done = CliRunner().invoke(run, ["-i", str(requests), "-o", str(nowhere), "--model", str(tmp_path / "none")])

    assert done.exit_code == 2, done.output
    assert f"{nowhere}: No such file" in done.stderr


def test_a_wrong_setting_is_one_line_and_exit_2(checkpoint: Path) -> None:
    done = millrace("run", "-i", "-", "-o", "-", "--model", checkpoint, "--set", "engine.max_num_seqs=lots")

    assert done.returncode == 2
    [line] = done.stderr.decode().splitlines()
    assert "engine.max_num_seqs" in line
    assert "lots" in line


def test_the_input_is_never_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_bytes(completion_line())

    done = millrace("run", "-i", requests, "-o", requests, "--model", checkpoint)

    assert done.returncode == 2
    assert requests.read_bytes() == completion_line()


def test_several_files_gzip_or_not_are_one_run_into_a_directory(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "day-1.jsonl").write_bytes(completion_line(max_tokens=1) + b"\nbad")
    (tmp_path / "day-2.jsonl").write_bytes(gzip.compress(completion_line(max_tokens=1)))
    (tmp_path / "last").write_bytes(completion_line(max_tokens=1))
    inputs = [str(tmp_path / "day-*"), "-i", str(tmp_path / "last")]

    done = CliRunner().invoke(run, [*inputs, "-o", f"{tmp_path}/out/", "--model", str(checkpoint)])

    assert done.exit_code == 0, done.output
    answered = records_of((tmp_path / "out" / "output.jsonl").read_bytes())
    assert sorted(str(record["custom_id"]) for record in answered) == ["line-1", "line-3", "line-4"]
    [refused] = records_of((tmp_path / "out" / "errors.jsonl").read_bytes())
    assert refused["response"]["body"]["error"]["line"] == 2  # type: ignore[index]  # JSON


def test_broken_gzip_is_one_line_and_exit_1_and_runs_nothing_behind_it(checkpoint: Path, tmp_path: Path) -> None:
    broken, results = tmp_path / "in.gz", tmp_path / "out.jsonl"
    broken.write_bytes(gzip.compress(completion_line() + b"\n")[:-4])

    done = CliRunner().invoke(run, ["-i", str(broken), "-o", str(results), "--model", str(checkpoint)])

    assert done.exit_code == 1
    assert f"{broken}: its gzip data is broken" in done.stderr
    assert results.read_bytes() == b""


def test_a_missing_input_is_exit_2(checkpoint: Path) -> None:
    done = millrace("run", "-i", "nowhere.jsonl", "-o", "-", "--model", checkpoint)

    assert (done.returncode, done.stdout) == (2, b"")
    assert b"nowhere.jsonl" in done.stderr


@contextmanager
def one_line_and_more_to_come(checkpoint: Path, results: Path) -> Iterator[tuple[WarmProcess, int]]:
    """A run that has written the record of its one line so far, and the open end of its standard input."""
    read, write = os.pipe()
    with results.with_name("log").open("wb") as log:
        arguments = ["run", "-i", "-", "-o", str(results), "--model", str(checkpoint)]
        process = warm_interpreter().start(CLI, arguments, log, stdin=read)
    os.close(read)
    os.write(write, completion_line(max_tokens=1) + b"\n")
    try:
        wait_until(lambda: results.exists() and results.read_bytes().endswith(b"\n"), timeout_s=60)
        yield process, write
    finally:
        process.kill()
    [record] = records_of(results.read_bytes())
    assert record["custom_id"] == "line-1"


def test_a_record_is_written_while_the_input_is_still_open(checkpoint: Path, tmp_path: Path) -> None:
    with one_line_and_more_to_come(checkpoint, tmp_path / "out.jsonl") as (process, stdin):
        assert process.poll() is None
        os.close(stdin)
        assert process.wait(timeout=60) == 0


def test_an_interrupt_keeps_a_valid_file_and_exits_130(checkpoint: Path, tmp_path: Path) -> None:
    with one_line_and_more_to_come(checkpoint, tmp_path / "out.jsonl") as (process, stdin):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        os.close(stdin)


def test_a_broken_engine_leaves_a_record_for_what_ran_a_summary_and_exit_1(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, results, summary = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "summary.json"
    requests.write_bytes(b"\n".join([completion_line(max_tokens=1), completion_line(max_tokens=9, ignore_eos=True)]))
    execute, calls = StepExecutor.execute, itertools.count()

    def break_down(self: StepExecutor, items: Sequence[ForwardItem], *others: Any) -> ForwardResult:
        if any(item.start > 0 for item in items) and next(calls) > 0:
            raise MemoryError("the device is full")
        return execute(self, items, *others)

    monkeypatch.setattr(StepExecutor, "execute", break_down)
    arguments = ["-i", str(requests), "-o", str(results), "--summary", str(summary), "--model", str(checkpoint)]

    done = CliRunner().invoke(run, arguments)

    assert done.exit_code == 1, done.output
    assert "the device is full" in done.stderr
    codes = {str(r["custom_id"]): r["response"]["status_code"] for r in records_of(results.read_bytes())}  # type: ignore[index]  # JSON
    assert codes == {"line-1": 200, "line-2": 500}
    figures = json.loads(summary.read_text())
    assert (figures["requests"], figures["failed"]) == (2, 1)


def test_a_profile_is_a_trace_of_the_selected_steps(checkpoint: Path, tmp_path: Path) -> None:
    requests, trace = tmp_path / "in.jsonl", tmp_path / "trace.json"
    requests.write_bytes(b"\n".join([completion_line(max_tokens=9, ignore_eos=True)] * 2))
    selected = ["--set", "engine.profile.every_steps=2", "--set", "engine.profile.max_steps=3"]

    done = millrace("run", "-i", requests, "-o", "-", "--model", checkpoint, "--profile", trace, *selected)

    assert done.returncode == 0, done.stderr
    assert len(records_of(done.stdout)) == 2
    names = [e["name"] for e in json.loads(trace.read_bytes())["traceEvents"] if e.get("cat") == "user_annotation"]
    assert [int(name.split()[2]) for name in names if name.startswith("forward pass")] == [0, 2, 4]
    assert names.count("layer 1") == 3


def test_every_file_of_a_run_may_be_a_file_url(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([completion_line(max_tokens=1), b"bad"]))
    at, run = tmp_path.as_uri(), ("run", tmp_path / "in.jsonl", "--model", checkpoint)

    done = millrace(*run, "-o", f"{at}/o.jsonl", "--summary", f"{at}/s.json", "--profile", f"{at}/t.json")
    again = millrace(*run, "-o", f"{at}/again.jsonl", "--retry", f"{at}/o.jsonl")

    assert (done.returncode, again.returncode) == (0, 1), done.stderr + again.stderr
    assert len(records_of((tmp_path / "o.jsonl").read_bytes())) == 2
    assert json.loads((tmp_path / "s.json").read_bytes())["failed"] == 1
    assert (tmp_path / "t.json").stat().st_size > 0
    assert len(records_of((tmp_path / "again.jsonl").read_bytes())) == 1


def test_a_profile_that_cannot_be_written_is_exit_2_before_the_model_loads(tmp_path: Path) -> None:
    results, nowhere = tmp_path / "out.jsonl", tmp_path / "none" / "trace.json"
    results.write_text("an older run's results")

    done = millrace("run", "-i", "-", "-o", results, "--overwrite", "--model", "no model", "--profile", nowhere)

    assert done.returncode == 2, done.stderr
    assert f"{nowhere}: No such file" in done.stderr.decode()
    assert results.read_text() == "an older run's results"


def test_a_profile_never_overwrites_input_or_output(tmp_path: Path) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(completion_line())

    for profile in (requests, results, "-"):
        done = CliRunner().invoke(run, ["-i", str(requests), "-o", str(results), "--profile", str(profile)])

        assert done.exit_code == 2, done.output
        assert f"{profile} is also the " in done.stderr or "--profile -: accepted: a file" in done.stderr
    assert requests.read_bytes() == completion_line()
    assert not results.exists()


def test_a_profile_that_does_not_fit_the_disk_costs_no_record(checkpoint: Path, tmp_path: Path) -> None:
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(completion_line(max_tokens=2))

    done = millrace("run", "-i", requests, "-o", results, "--model", checkpoint, "--profile", "/dev/full")

    assert done.returncode == 1
    assert b"/dev/full: the trace is not complete: " in done.stderr
    assert len(records_of(results.read_bytes())) == 1


def test_a_full_disk_is_told_with_the_file_and_how_to_go_on(checkpoint: Path, tmp_path: Path) -> None:
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(completion_line(max_tokens=2))
    arguments = ["run", "-i", str(requests), "--model", str(checkpoint)]
    summary = millrace(*arguments, "-o", str(output), "--summary", "/dev/full")
    assert (summary.returncode, summary.stderr.count(b"millrace: /dev/full: [Errno 28] No space left on device\n")) == (
        1,
        1,
    )
    assert len(records_of(output.read_bytes())) == 1
    device = millrace(*arguments, "-o", "/dev/full")
    assert (device.returncode, device.stderr.count(b"millrace: /dev/full: [Errno 28] No space left on device\n")) == (
        1,
        1,
    )
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("worker.cli.run.record_output", side_effect=full):
        file = CliRunner().invoke(run, [*arguments[1:], "-o", str(output), "--overwrite"])
    assert file.exit_code == 1
    assert "out.jsonl: [Errno 28] No space left on device; the same command with --resume goes on" in file.stderr


def test_ignored_parameters_are_counted_in_the_summary(checkpoint: Path, tmp_path: Path) -> None:
    requests, summary = tmp_path / "in.jsonl", tmp_path / "summary.json"
    requests.write_bytes(b"\n".join([completion_line(max_tokens=1, best_of=2), completion_line(max_tokens=1)]))
    options = ("--model", checkpoint, "--summary", summary, "--ignore-param", "best_of")

    done = millrace("run", "-i", requests, "-o", "-", *options)

    assert done.returncode == 0, done.stderr
    assert [record["response"]["status_code"] for record in records_of(done.stdout)] == [200, 200]  # type: ignore[index]
    assert json.loads(summary.read_text())["ignored_params"] == {"best_of": 1}
    assert done.stderr.decode().splitlines()[-1] == "ignored best_of in 1 line"


def test_a_prompt_cannot_be_ignored(checkpoint: Path) -> None:
    done = millrace("run", "-i", "-", "-o", "-", "--model", checkpoint, "--ignore-param", "prompt")

    assert done.returncode == 2
    assert done.stderr.startswith(b"millrace: --ignore-param prompt: it cannot be left out of a line; accepted: ")
