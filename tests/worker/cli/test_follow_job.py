"""Watching a job, with a client that tells a story."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from worker.cli import follow_job as module
from worker.cli.command_error import CommandError
from worker.cli.follow_job import follow_job, require_completed
from worker.cli.job_text import progress_text
from worker.client import BatchClient
from worker.schemas import JobState, JobStatus, JobUsage, RequestCounts


def job_status(status: JobState, completed: int = 0, failed: int = 0, error: str | None = None) -> JobStatus:
    return JobStatus(
        id="s0-1",
        status=status,
        created_at=0.0,
        request_counts=RequestCounts(total=10, completed=completed, failed=failed),
        usage=JobUsage(input_tokens=100, cached_tokens=25, output_tokens=7, total_tokens=107),
        shards_total=1,
        shards_done=0,
        priority=5,
        tenant="default",
        metadata={},
        error=error,
    )


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


def test_the_progress_line_has_rate_time_left_and_hit_rate() -> None:
    text = progress_text(job_status(JobState.IN_PROGRESS, 4, 1), rate_per_s=2.5)

    assert text == "in_progress 5/10 (50%), 1 failed, 2.5 requests/s, prefix hits 25%, about 2 s left"


def test_an_ended_job_has_no_time_left() -> None:
    assert "left" not in progress_text(job_status(JobState.COMPLETED, 10), rate_per_s=2.5)
