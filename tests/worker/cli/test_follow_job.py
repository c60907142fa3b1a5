"""Watching a job, with a client that tells a story."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.job_status import job_status
from worker.cli import jobs as module
from worker.cli.exit_codes import CommandError
from worker.cli.jobs import follow_job, require_completed
from worker.client import BatchClient
from worker.schemas import JobState, JobStatus


class ToldClient(BatchClient):
    """A client whose `status` gives one snapshot after the other."""

    def __init__(self, story: list[JobStatus]) -> None:
        self.story: Iterator[JobStatus] = iter(story)

    def status(self, job_id: str) -> JobStatus:
        return next(self.story)


def test_each_change_is_told_once_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    start, half = job_status(JobState.VALIDATING), job_status(JobState.IN_PROGRESS, 5)
    end = job_status(JobState.COMPLETED, 9, 1)
    told: list[JobStatus] = []

    job = follow_job(ToldClient([start, start, half, half, end]), "s0-1", told.append)

    assert told == [start, half, end]
    assert job == end


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

    follow_job(ToldClient([*story, job_status(JobState.COMPLETED, 9, 1)]), "s0-1", plain_lines=True)

    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert [line.split()[0] for line in lines] == ["validating", "in_progress", "completed"]
    assert lines[-1].endswith("prefix hits 25%, 1 errors")


def test_without_a_terminal_and_unasked_nothing_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)

    follow_job(ToldClient([job_status(JobState.VALIDATING), job_status(JobState.COMPLETED, 10)]), "s0-1")

    assert capsys.readouterr().err == ""
