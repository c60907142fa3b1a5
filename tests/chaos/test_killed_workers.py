"""Workers that are killed, frozen for longer than a lease, or poisoned by a prompt: their work is done once."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.chaos.faults import DEATHS
from tests.chaos.fleet import running_fleet
from tests.chaos.jobs import (
    Record,
    check_counters,
    check_invariants,
    check_nothing_is_left,
    check_records,
    contents,
    prompts,
    submit_jobs,
    undisturbed,
    wait_all,
    was_claimed_again,
)
from tests.chaos.worker_program import WorkerOptions
from tests.support.fake_engine import KILL
from tests.support.processes import wait_until
from worker.client import BatchClient
from worker.schemas import JobState

# A request takes 8 steps of 5 ms, 8 requests at a time: 120 prompts keep a worker for more than half a second.
SLOW = WorkerOptions(engine={"steps_per_request": 8, "step_s": 0.005})

BY_DEFAULT = "mid-decode"

START_S = 90.0  # of a worker, on a busy machine

# 40 prompts a second: both jobs last for three seconds.
TWO_SLOTS = WorkerOptions(engine={"steps_per_request": 5, "step_s": 0.01, "slots": 2})

# A request takes 3 steps of 10 ms, 16 requests at a time: a killer dies in company of others.
COMPANIONABLE = WorkerOptions(engine={"steps_per_request": 3, "step_s": 0.01, "slots": 16})
NUM_PROMPTS = 40


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
        wait_until(lambda: worker.num_lives == 2, timeout_s=START_S)
        check_counters(bare)
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert worker.exit_codes == [-9]
        assert fleet.stop() == [0]


@pytest.mark.chaos
def test_a_worker_frozen_past_its_lease_wakes_up_and_disturbs_nobody(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, TWO_SLOTS) as fleet:
        frozen = fleet.start()
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=2, num_prompts=60)
        (first, *_) = jobs
        wait_until(lambda: client.status(first).request_counts.finished > 0)
        frozen.freeze()
        fleet.start()
        fleet.wait_up(client, count=2)
        # A second claim on a shard follows a lease that ran out, since nothing was given back.
        wait_until(lambda: was_claimed_again(bare))
        frozen.thaw()
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert fleet.stop() == [0, 0]
        assert fleet.num_restarts == 0


def _poisoned(killers: tuple[int, ...]) -> tuple[list[dict[str, str]], dict[str, Record]]:
    """Lines of which some kill their worker, and the records of the others."""
    lines = prompts(NUM_PROMPTS, of="poisoned")
    innocent = undisturbed(line for number, line in enumerate(lines) if number not in killers)
    for number in killers:
        lines[number]["prompt"] += KILL
    return lines, innocent


@pytest.mark.parametrize(
    ("killers", "shard_size", "num_crashes"),
    [
        ((20,), "10", 4),  # in company; alone, in a shard of ten; twice by itself
        pytest.param(  # in company; alone, in a shard of sixteen with both; each of them twice by itself
            *((20, 21), "16", 6), marks=pytest.mark.chaos
        ),
    ],
)
def test_only_the_prompts_that_kill_have_errors(
    client: BatchClient,
    bare: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    killers: tuple[int, ...],
    shard_size: str,
    num_crashes: int,
) -> None:
    poisoned, innocent = _poisoned(killers)
    bystanders = [prompts(NUM_PROMPTS, of=name) for name in ("one", "two")]
    with running_fleet(redis_url, tmp_path, COMPANIONABLE, {"worker.shard_size": shard_size}) as fleet:
        workers = [fleet.start(), fleet.start()]
        fleet.wait_up(client)
        poisoned_id = client.submit(poisoned)
        innocent_jobs = {client.submit(lines): undisturbed(lines) for lines in bystanders}
        wait_all(client, {poisoned_id: innocent, **innocent_jobs}, timeout_s=120.0)  # six starts of workers
        for job_id, expected in innocent_jobs.items():
            assert contents(client.results(job_id)) == expected
        job = client.status(poisoned_id)
        assert (job.status, job.request_counts.failed) == (JobState.COMPLETED, len(killers))
        assert job.shards_done == job.shards_total
        check_records(client, bare, poisoned_id, num_prompts=NUM_PROMPTS)
        found = contents(client.results(poisoned_id))
        lost = {f"poisoned-{number}": found.pop(f"poisoned-{number}") for number in killers}
        assert {record["response"]["body"]["error"]["code"] for record in lost.values()} == {"worker_lost"}
        assert found == innocent
        check_nothing_is_left(bare)
        codes = [code for worker in workers for code in worker.exit_codes]
        assert codes == [-9] * len(codes)
        assert len(codes) <= num_crashes
        wait_until(lambda: all(worker.log.count(" is up") == worker.num_lives for worker in workers), timeout_s=30)
        assert fleet.stop() == [0, 0]
