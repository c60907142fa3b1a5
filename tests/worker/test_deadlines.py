"""Deadlines that pass where no worker ends the job: whoever looks at it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.support.registry import TestRegistry, must_claim, ok
from worker.client import BatchClient
from worker.registry.jobs import WORKER_LATE_S
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim
from worker.registry.lifecycle import PutStatus
from worker.results import EndAttempts
from worker.schemas import JobState, SubmitOptions


def _overdue(registry: TestRegistry) -> str:
    """A planned job of three lines, one with its record, whose deadline has passed; its worker is gone."""
    job_id = registry.running_job([0, 1], [2], options=SubmitOptions(deadline_s=60))
    leases = registry.leases()
    held = must_claim(leases, UnitRef.shard(job_id, 0))
    leases.put(held, [ok(0)])
    leases.release(held, count_attempt=False)
    registry.expire(job_id)
    registry.redis.delete(registry.keys.served)
    return job_id


LOOKS: dict[str, Callable[[BatchClient, str], object]] = {
    "status": lambda client, job_id: client.status(job_id),
    "wait": lambda client, job_id: client.wait(job_id, timeout_s=30),
    "follow": lambda client, job_id: list(client.results(job_id, follow=True)),
    "follow in input order": lambda client, job_id: list(client.results(job_id, follow=True, order="input")),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_without_a_worker_a_deadline_ends_the_job_of_whoever_looks(
    client: BatchClient, registry: TestRegistry, look: Callable[[BatchClient, str], object]
) -> None:
    job_id = _overdue(registry)
    rescue = threading.Timer(30.0, client.cancel, [job_id])  # of a follower that would wait for ever
    rescue.start()
    look(client, job_id)
    rescue.cancel()
    rescue.join()
    [job] = client.jobs()
    assert (job.status, job.request_counts.expired, job.request_counts.completed) == (JobState.EXPIRED, 2, 1)
    assert not registry.redis.zcard(registry.keys.open)


def test_a_queued_job_expires_without_a_worker(client: BatchClient, registry: TestRegistry) -> None:
    job_id = client.submit([{"prompt": "a"}, b"{bad"], deadline_s=60)
    assert client.status(job_id).status is JobState.VALIDATING
    registry.expire(job_id)
    job = client.wait(job_id, timeout_s=30)
    assert (job.status, job.request_counts.failed, job.request_counts.expired) == (JobState.EXPIRED, 2, 1)
    assert [record["custom_id"] for record in client.results(job_id)] == ["line-1", None]


def test_workers_are_given_time_to_end_what_has_expired(client: BatchClient, registry: TestRegistry) -> None:
    job_id = _overdue(registry)
    registry.serve("fake")
    deadline_ms = round(1000 * (registry.time_s() - 1))
    registry.redis.hset(registry.keys.job(job_id), "deadline", deadline_ms)
    assert client.status(job_id).status is JobState.IN_PROGRESS
    registry.redis.hset(registry.keys.job(job_id), "deadline", deadline_ms - round(1000 * WORKER_LATE_S))
    assert client.status(job_id).status is JobState.EXPIRED


def test_what_a_worker_holds_is_left_to_it_at_a_deadline(client: BatchClient, registry: TestRegistry) -> None:
    job_id = _overdue(registry)
    held = registry.leases().claim(UnitRef.shard(job_id, 0))
    assert client.status(job_id).status is JobState.FINALIZING
    assert isinstance(held, Claim)
    assert registry.leases().renew([held])[0][0] is PutStatus.OPEN


def test_ten_who_wait_for_what_a_worker_holds_do_not_claim_it(redis_url: str, registry: TestRegistry) -> None:
    job_id = registry.running_job(*([index] for index in range(50)), options=SubmitOptions(deadline_s=60))
    held = [must_claim(registry.leases(), UnitRef.shard(job_id, number)) for number in range(50)]
    registry.expire(job_id)
    with ExitStack() as stack:
        clients = [stack.enter_context(BatchClient(redis_url)) for _ in range(10)]
        registry.redis.config_resetstat()
        for client in clients * 3:
            assert client.status(job_id).status is JobState.IN_PROGRESS
        calls = registry.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
        assert calls <= 30  # whether its plan is lost, at each look; not its 51 units
        assert all(status is PutStatus.OPEN for status, _, _ in registry.leases().renew(held))
        for claim in held:
            registry.let_pass(claim.ref, 60.0)
        assert clients[0].wait(job_id, timeout_s=60.0).status is JobState.EXPIRED


def test_a_client_tries_to_end_a_job_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = EndAttempts()
    at_s = [0.0, 0.0, 0.9, 1.0, 1.5, 2.5]
    monkeypatch.setattr(time, "monotonic", iter(at_s).__next__)
    jobs = ["a", "b", "a", "a", "b", "b"]
    assert [attempts.is_due(job_id) for job_id in jobs] == [True, True, False, True, True, True]


def test_units_are_unheld_by_the_end_of_their_lease(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1], [2])
    first, second, third = (UnitRef.shard(job_id, number) for number in range(3))
    must_claim(registry.leases(lease_s=30.0), first)
    must_claim(registry.leases(lease_s=30.0), second)
    assert registry.control.unheld_units(job_id) == [third]
    registry.let_pass(first, 31.0)
    registry.let_pass(second, -31.0)  # as after a clock has gone back
    assert registry.control.unheld_units(job_id) == [first, second, third]


def test_a_forged_number_of_shards_is_looked_at_within_bounds(registry: TestRegistry) -> None:
    job_id = _overdue(registry)
    registry.redis.hset(registry.keys.job(job_id), "ns", 10**9)
    registry.redis.config_resetstat()
    units = registry.control.unheld_units(job_id)
    assert units == [UnitRef.shard(job_id, 0), UnitRef.shard(job_id, 1)]
    # The job, its plan, and three units for each line or record, see cancel.lua
    assert registry.redis.info("commandstats")["cmdstat_hmget"]["calls"] <= 2 + 1 + 3 * 3
