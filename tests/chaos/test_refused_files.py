"""Strict jobs whose file is bad: refused once, whoever dies over it, and not a line of them runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.chaos.death import DEATHS_OF_PLANS
from tests.chaos.fleet import running_fleet
from tests.chaos.invariants import check_admission, check_nothing_is_left
from tests.chaos.jobs import prompts
from tests.support.wait_until import wait_until
from worker.client import BatchClient
from worker.schemas import JobState

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("point", DEATHS_OF_PLANS)
def test_a_bad_file_is_refused_once_although_its_planner_is_killed(
    point: str, client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path) as fleet:
        worker = fleet.start(die_at=point)
        fleet.wait_up(client)
        job_id = client.submit([*prompts(300), b"{"], strict=True)
        wait_until(lambda: worker.num_lives == 2)
        check_admission(bare)
        job = client.wait(job_id, 45.0)
        assert (job.status, job.request_counts.total) == (JobState.FAILED, 0)
        assert [(error.code, error.line) for error in job.errors] == [("invalid_json_line", 301)]
        assert list(client.results(job_id)) == []
        check_nothing_is_left(bare)
        assert fleet.stop() == [0]
