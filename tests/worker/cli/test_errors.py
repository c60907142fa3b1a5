from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from tests.support.job_status import job_status
from worker.cli import jobs as errors
from worker.schemas import JobState, JobStatus


class FailedJob:
    """A client of one job, which failed before any of its requests had a record."""

    def status(self, _job_id: str) -> JobStatus:
        return job_status(JobState.FAILED, error="line 2: not JSON")

    def errors(self, _job_id: str) -> Iterator[dict[str, object]]:
        return iter(())


@contextmanager
def _client(_effective: object) -> Iterator[FailedJob]:
    yield FailedJob()


def test_of_a_job_that_failed_without_records_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "job_client", _client)

    done = CliRunner().invoke(errors.errors, ["s0-1"])

    assert done.exit_code == 0
    assert done.stdout == ""
    assert done.stderr == "the job itself failed: line 2: not JSON\n"
