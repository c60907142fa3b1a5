"""A flood of urgent jobs holds a patient one up, not for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos.fleet import running_fleet
from tests.chaos.jobs import prompts
from tests.chaos.worker_options import WorkerOptions
from worker.client import BatchClient

# 4 requests at a time, each of 5 steps of 10 ms: 80 prompts a second at most.
SLOW = WorkerOptions(engine={"steps_per_request": 5, "step_s": 0.01, "slots": 4})
NUM_URGENT = 8  # jobs of 20 prompts that are unfinished at any time: two seconds of work
AGEING_S = 0.3
# Seven steps of ageing to the first lane, a reaper's look and its grace, then the two seconds that wait there; the rest
# is for a machine with other things to do.
BOUND_S = 7 * AGEING_S + 0.3 + 0.5 + 2.0 + 10.0


@pytest.mark.chaos
def test_the_least_urgent_job_starts_within_its_bound_in_an_endless_flood(
    client: BatchClient, redis_url: str, tmp_path: Path
) -> None:
    settings = {"worker.ageing_s": str(AGEING_S)}
    with running_fleet(redis_url, tmp_path, SLOW, settings) as fleet:
        fleet.start()
        fleet.wait_up(client)
        urgent: set[str] = set()
        _flood(client, urgent)
        patient = client.submit(prompts(10, of="patient"), priority=9)
        until_s = time.monotonic() + BOUND_S
        num_flooded = 0
        while client.status(patient).request_counts.completed == 0:
            assert time.monotonic() < until_s, f"starved behind {num_flooded} urgent jobs"
            num_flooded += _flood(client, urgent)
            time.sleep(0.02)
        assert num_flooded >= NUM_URGENT // 2  # it had to wait
        assert fleet.stop() == [0]


def _flood(client: BatchClient, urgent: set[str]) -> int:
    """Replace the urgent jobs that are finished; how many."""
    urgent -= {job_id for job_id in urgent if client.status(job_id).status.is_terminal}
    missing = NUM_URGENT - len(urgent)
    urgent |= {client.submit(prompts(20, of="urgent"), priority=0) for _ in range(missing)}
    return missing
