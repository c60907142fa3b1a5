"""Jobs to be disturbed, and clients that do not wait half a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import redis

from tests.chaos.undisturbed import Record, undisturbed
from worker.client import BatchClient

T = TypeVar("T")
GRACE_S = 1.0


@contextmanager
def impatient_client(redis_url: str) -> Iterator[BatchClient]:
    """A client whose jobs are announced again after a second, not half a minute, if their message is lost."""
    with BatchClient(redis_url) as client:
        client._intake._grace_s = GRACE_S
        yield client


def prompts(count: int, *, of: str = "job") -> list[dict[str, str]]:
    """Lines for the fake engine."""
    return [{"custom_id": f"{of}-{number}", "prompt": f"{of}, prompt {number}"} for number in range(count)]


def submit_jobs(client: BatchClient, num_jobs: int, num_prompts: int) -> dict[str, dict[str, Record]]:
    """Submit jobs of two tenants and several priorities; by id, the contents that they must end with."""
    jobs = {}
    for number in range(num_jobs):
        lines = prompts(num_prompts, of=f"job {number}")
        job_id = client.submit(lines, tenant=f"tenant-{number % 2}", priority=(5, 2, 8)[number % 3])
        jobs[job_id] = undisturbed(lines)
    return jobs


def wait_all(client: BatchClient, jobs: dict[str, dict[str, Record]], timeout_s: float = 45.0) -> None:
    """Wait until every job has ended; 45 s is what a lease and a grace of production allow."""
    until_s = time.monotonic() + timeout_s
    for job_id in jobs:
        insist(partial(_wait, client, job_id, until_s), timeout_s)


def _wait(client: BatchClient, job_id: str, until_s: float) -> None:
    client.wait(job_id, max(until_s - time.monotonic(), 0.1))


def was_claimed_again(bare: redis.Redis) -> bool:
    """Whether some unfinished shard has its second claim, by whoever took it after its first lease ran out."""
    return any(bare.hget(shard, "fence") == b"2" for shard in bare.scan_iter("millrace:*:s:[0-9]*"))


def insist(call: Callable[[], T], timeout_s: float = 30.0) -> T:
    """What `call` returns, as soon as Redis can be had; redis.RedisError after `timeout_s` seconds."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except redis.RedisError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
