"""How a job is followed until its end: what is shown, what is written, and what Ctrl-C leaves."""

from __future__ import annotations

import io
import json
import re
import signal
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result
from redis.exceptions import AuthenticationError, ConnectionError, NoPermissionError, TimeoutError

from settings import RedisSettings
from tests.support.processes import WarmProcess, wait_until, warm_interpreter
from tests.support.registry import TestRegistry, must_claim, ok
from tests.support.request_lines import job_status
from tests.support.workers import CLI, millrace
from worker.cli import follow as module
from worker.cli.exit_codes import CommandError
from worker.cli.failures import MaxFailed
from worker.cli.files import RecordPaths
from worker.cli.follow import (
    LOOK_AFTER_S,
    LOOK_EVERY_S,
    NO_WORKER,
    Followed,
    Reading,
    WorkerLookout,
    follow_job,
    follow_records,
    may_list_workers,
    require_completed,
)
from worker.cli.main import cli
from worker.client import BatchClient, ResultPages
from worker.registry.keys import UnitRef
from worker.registry.leases import PromptRecord
from worker.registry.lifecycle import Outcome
from worker.schemas import JobState, JobStatus, WorkerInfo

WORKER = WorkerInfo(id="w", version="1", model="m", steps=0, open_requests=0, held=0)


Told = TypeVar("Told")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def of_a_stranger(message: str) -> ConnectionError:
    """What a client raises where the server's certificate is not one that it trusts."""
    error = ConnectionError(message)
    error.__cause__ = ssl.SSLCertVerificationError(message)
    return error


class ToldClient(BatchClient):
    """A client whose `status` gives one snapshot after the other, or raises what stands in its place."""

    def __init__(self, story: Sequence[JobStatus | Exception]) -> None:
        self.story = iter(story)

    def status(self, job_id: str) -> JobStatus:
        return told(next(self.story))


def told(what: Told | Exception) -> Told:
    if isinstance(what, Exception):
        raise what
    return what


class ToldPages(ResultPages):
    """Pages of records, or errors in their place."""

    cursor = "2-x"

    def __init__(self, story: Sequence[list[dict[str, Any]] | Exception]) -> None:
        self.story = iter(story)

    def __next__(self) -> Iterator[dict[str, Any]]:
        return iter(told(next(self.story)))


def test_each_change_is_told_once_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    start, half = job_status(JobState.VALIDATING), job_status(JobState.IN_PROGRESS, 5)
    end = job_status(JobState.COMPLETED, 9, 1)
    told: list[JobStatus] = []

    job = follow_job(Followed(ToldClient([start, start, half, half, end]), "s0-1"), told.append)

    assert told == [start, half, end]
    assert job == end


def test_a_redis_that_goes_away_is_asked_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    half, end = job_status(JobState.IN_PROGRESS, 5), job_status(JobState.COMPLETED, 9, 1)
    client = ToldClient([half, ConnectionError("refused"), TimeoutError("slow"), end, end])
    seen: list[JobStatus] = []
    assert follow_job(Followed(client, "s0-1"), seen.append) == end
    assert seen == [half, end]
    assert capsys.readouterr().err.count("Redis is away, asked until it is back: refused\n") == 1

    pages = ToldPages([[{"a": 1}], ConnectionError("gone"), [], [{"b": 2}], TimeoutError("slow"), [{"c": 3}]])
    monkeypatch.setattr(client, "pages", lambda *_, **__: pages)
    records: list[Mapping[str, object]] = []
    assert follow_records(Followed(client, "s0-1"), Reading(RecordPaths("-", None), records.append)) == end
    assert records == [{"a": 1}, {"b": 2}, {"c": 3}]


@pytest.mark.parametrize(
    "story",
    [
        [ConnectionError("refused")],
        [job_status(JobState.IN_PROGRESS), AuthenticationError("wrong password")],
        [job_status(JobState.IN_PROGRESS), of_a_stranger("wrong certificate")],
    ],
)
def test_a_redis_that_never_answered_or_refuses_is_not_asked_again(
    story: list[JobStatus | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    with pytest.raises(ConnectionError, match=r"refused|wrong"):
        follow_job(Followed(ToldClient(story), "s0-1"))


def test_an_error_has_a_line_of_its_own_behind_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)

    with pytest.raises(StopIteration):  # in place of an error of Redis
        follow_job(Followed(ToldClient([job_status(JobState.VALIDATING)]), "s0-1"))

    assert "validating 0/10" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.EXPIRED, JobState.CANCELLED])
def test_an_end_that_is_no_completion_is_an_error(state: JobState) -> None:
    with pytest.raises(CommandError, match=rf"job s0-1 .*{state.value}.*: the reason") as raised:
        require_completed(job_status(state, error="the reason"))

    assert raised.value.exit_code == 1


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.IN_PROGRESS, JobState.CANCELLING])
def test_completion_with_failed_lines_and_a_running_job_are_no_errors(state: JobState) -> None:
    require_completed(job_status(state, 8, 2))


def test_plain_lines_tell_each_state_and_not_every_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    story = [job_status(JobState.VALIDATING)] * 3 + [job_status(JobState.IN_PROGRESS, number) for number in range(5)]

    follow_job(Followed(ToldClient([*story, job_status(JobState.COMPLETED, 9, 1)]), "s0-1"))

    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert [line.split()[0] for line in lines] == ["validating", "in_progress", "completed"]
    assert ": 9 completed, 1 failed, " in lines[-1]


def test_without_a_terminal_and_unasked_nothing_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)

    story = [job_status(JobState.VALIDATING), job_status(JobState.COMPLETED, 10)]

    follow_job(Followed(ToldClient(story), "s0-1", plain_lines=False))

    assert capsys.readouterr().err == ""


def test_a_job_of_which_every_line_failed_is_no_success() -> None:
    with pytest.raises(CommandError, match="job s0-1: all 10 requests failed") as raised:
        require_completed(job_status(JobState.COMPLETED, 0, 10))

    assert raised.value.exit_code == 1


def test_how_many_may_fail_is_the_callers_to_say() -> None:
    job = job_status(JobState.COMPLETED, 8, 2)

    require_completed(job, MaxFailed("2", count=2))
    with pytest.raises(CommandError, match=r"2 of 10 requests failed; accepted: at most 1 \(--max-failed\)"):
        require_completed(job, MaxFailed("1", count=1))


class LookedAt(BatchClient):
    """A client that says which workers are up, and counts how often it is asked."""

    def __init__(self, *workers: WorkerInfo, error: Exception | None = None) -> None:
        self.up = list(workers)
        self.error = error
        self.num_looks = 0

    def workers(self) -> list[WorkerInfo]:
        self.num_looks += 1
        if self.error is not None:
            raise self.error
        return self.up


def test_that_no_worker_is_up_is_said_once_nothing_moves() -> None:
    client = LookedAt()
    lookout = WorkerLookout(client, may_look=True)
    waiting = job_status(JobState.VALIDATING)

    assert lookout.waits_for(waiting, 0.0) == ""
    assert lookout.waits_for(waiting, LOOK_AFTER_S) == NO_WORKER
    assert lookout.waits_for(waiting, LOOK_AFTER_S + 1) == NO_WORKER
    assert client.num_looks == 1
    client.up = [WORKER]
    assert lookout.waits_for(waiting, LOOK_AFTER_S + LOOK_EVERY_S) == ""


def test_a_model_that_nobody_serves_is_said_once_nothing_moves() -> None:
    lookout = WorkerLookout(LookedAt(WORKER), may_look=True)
    waiting = job_status(JobState.IN_PROGRESS, 3).model_copy(update={"waiting_for": ("bge-small", "other")})

    assert lookout.waits_for(waiting, 0.0) == ""
    said = "no worker serves bge-small (millrace worker --model DIR starts one)"
    assert lookout.waits_for(waiting, LOOK_AFTER_S) == said
    assert lookout.waits_for(job_status(JobState.IN_PROGRESS, 3), LOOK_AFTER_S + 1) == ""


def test_while_records_come_nobody_looks_for_workers() -> None:
    client = LookedAt()
    lookout = WorkerLookout(client, may_look=True)

    said = [lookout.waits_for(job_status(JobState.IN_PROGRESS, n), 100.0 * n) for n in range(5)]
    said.append(lookout.waits_for(job_status(JobState.COMPLETED, 4), 1000.0))

    assert (said, client.num_looks) == ([""] * 6, 0)


def test_who_may_not_list_workers_is_told_nothing_of_them() -> None:
    denied = LookedAt(error=NoPermissionError())
    for lookout in (WorkerLookout(LookedAt(), may_look=False), WorkerLookout(denied, may_look=True)):
        said = {lookout.waits_for(job_status(JobState.VALIDATING), 100.0 * n) for n in range(5)}
        assert said == {""}

    assert denied.num_looks == 1
    for user, may in (("millrace-worker", False), ("millrace-producer", True)):
        url: Any = f"redis://{user}:secret@127.0.0.1/0"
        assert may_list_workers(RedisSettings(url=url)) is may


@pytest.mark.parametrize(
    ("paths", "options"),
    [
        (RecordPaths("-", None), "--follow --order input --cursor 7"),
        (RecordPaths("my out.jsonl", None), "--follow --order input --cursor 7 >> 'my out.jsonl'"),
        (RecordPaths("out.jsonl.gz", None), "--follow --order input --cursor 7 | gzip >> out.jsonl.gz"),
        (RecordPaths("a", "b"), "--follow --order input --cursor 3 -o a --errors-file b"),
    ],
)
def test_the_other_records_are_got_without_losing_those_written(paths: RecordPaths, options: str) -> None:
    reading = Reading(paths, lambda record: None, cursor="3", order="input")

    assert reading.rest_options("7") == f" {options}"


class RunningJob:
    """A job of five lines, three of which have their record."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        self.registry = TestRegistry.at(redis_url)
        self.job_id = self.registry.running_job(range(5))
        self.write(0, 1, 2)

    def write(self, *indices: int) -> None:
        leases = self.registry.leases()
        records = [ok(index, json.dumps({"custom_id": str(index)})) for index in indices]
        leases.put(must_claim(leases, UnitRef.shard(self.job_id, 0)), records)

    @contextmanager
    def command(self, log: Path, *arguments: str) -> Iterator[WarmProcess]:
        """A command that runs for the length of the block."""
        with log.open("wb") as file:
            process = warm_interpreter().start(CLI, [*arguments, "--redis-url", self.redis_url], file)
        try:
            yield process
        finally:
            process.kill()
            process.wait(60)


@pytest.fixture
def job(redis_url: str) -> RunningJob:
    return RunningJob(redis_url)


class FailedLines:
    """A job of four lines, some of which have an error record."""

    def __init__(self, redis_url: str, num_failed: int) -> None:
        self.redis_url = redis_url
        registry = TestRegistry.at(redis_url)
        self.job_id = registry.running_job(range(4))
        leases = registry.leases()
        error = {"code": "invalid_value", "message": "not so", "line": 1}
        record = json.dumps({"response": {"status_code": 400, "body": {"error": error}}})
        failed = [PromptRecord(index, Outcome.ERROR, record) for index in range(num_failed)]
        good = [ok(index, '{"response": {"status_code": 200}}') for index in range(num_failed, 4)]
        leases.put(must_claim(leases, UnitRef.shard(self.job_id, 0)), failed + good)

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli, [*arguments, self.job_id, "--redis-url", self.redis_url])


COMMANDS = [["status"], ["watch"], ["results", "--follow"], ["results", "--follow", "-o", "out.jsonl"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_without_any_answer_is_exit_1_to_whoever_waits(redis_url: str, command: list[str]) -> None:
    job = FailedLines(redis_url, 4)

    done = job(*command)

    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == f"millrace: job {job.job_id}: all 4 requests failed"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_with_some_answers_is_exit_1_to_who_wants_more(redis_url: str, command: list[str]) -> None:
    job = FailedLines(redis_url, 1)

    codes = [job(*command, *options).exit_code for options in ([], ["--max-failed", "25%"], ["--max-failed", "0"])]

    assert codes == [0, 0, 1]


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_the_failed_requests_of_a_job_are_summed_up_at_the_end(redis_url: str, command: list[str]) -> None:
    job = FailedLines(redis_url, 3)

    lines = job(*command).stderr.splitlines()

    shown_by = f"millrace errors {job.job_id} --redis-url {redis_url} shows them:"
    assert lines[-2] == f"3 of 4 requests failed; {shown_by}"
    assert lines[-1] == "       3  invalid_value (line 1 and others)"


def test_how_many_may_fail_is_not_asked_of_what_does_not_wait(redis_url: str) -> None:
    assert FailedLines(redis_url, 1)("results", "--max-failed", "1").exit_code == 2


def test_ctrl_c_leaves_the_records_and_says_how_to_get_the_others(job: RunningJob, tmp_path: Path) -> None:
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    with job.command(log, "results", job.job_id, "--follow", "-o", str(output)) as process:
        wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") == 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130

    said = log.read_text()
    assert f"the job goes on: millrace watch {job.job_id} --redis-url {job.redis_url}" in said
    again = re.search(rf"results {job.job_id} --redis-url {job.redis_url} --follow --cursor (3-\S+) >> {output}", said)
    assert again is not None
    for cursor in ("3", again[1]):
        rest = millrace("results", job.job_id, "--cursor", cursor, "--redis-url", job.redis_url)
        assert (rest.returncode, rest.stdout) == (0, b"")


def test_ctrl_c_ends_a_watch_and_leaves_the_job(job: RunningJob, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with job.command(log, "watch", job.job_id) as process:
        wait_until(lambda: "in_progress 3/5" in log.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130

    assert "the job goes on: millrace watch" in log.read_text()
    assert job.registry.status(job.job_id).status is JobState.IN_PROGRESS


def test_results_that_are_followed_into_a_file_show_progress(job: RunningJob, tmp_path: Path) -> None:
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    with job.command(log, "results", "latest", "--follow", "-o", str(output)) as process:
        wait_until(lambda: "in_progress 3/5 (60%)" in log.read_text())
        assert process.poll() is None


def test_without_a_worker_it_is_said_what_the_job_waits_for(job: RunningJob, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with job.command(log, "watch", job.job_id[:20]):
        # The heartbeat of an earlier test's worker may live for half a minute.
        wait_until(lambda: f"in_progress 3/5 (60%), {NO_WORKER}" in log.read_text(), timeout_s=90)
