"""kill -9: whatever a worker was doing, its work is done by somebody, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.chaos.death import DEATHS
from tests.chaos.fleet import running_fleet
from tests.chaos.invariants import check_admission, check_invariants
from tests.chaos.jobs import submit_jobs, wait_all
from tests.chaos.worker_options import WorkerOptions
from tests.support.wait_until import wait_until
from worker.client import BatchClient

# A request takes 8 steps of 5 ms, 8 requests at a time: 120 prompts keep a worker for more than half a second.
SLOW = WorkerOptions(engine={"steps_per_request": 8, "step_s": 0.005})


BY_DEFAULT = "mid-decode"


@pytest.mark.parametrize("point", [pytest.param(p, marks=[] if p == BY_DEFAULT else pytest.mark.chaos) for p in DEATHS])
def test_what_a_worker_held_when_it_was_killed_is_done_by_its_successor(
    point: str, client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, SLOW) as fleet:
        worker = fleet.start(die_at=point)
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=3, num_prompts=40)
        if point == "during drain":
            wait_until(lambda: bare.hlen("unacked") > 0)
            worker.terminate()
        wait_until(lambda: worker.num_lives == 2)
        check_admission(bare)
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert worker.exit_codes == [-9]
        assert fleet.stop() == [0]
