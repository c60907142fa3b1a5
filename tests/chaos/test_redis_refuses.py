"""Redis answers, but takes no writes: out of memory, a full disk, a replica. Work waits, and goes on afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import redis

from tests.chaos.faults import redis_setting
from tests.chaos.fleet import running_fleet
from tests.chaos.jobs import check_invariants, impatient_client, insist, prompts, submit_jobs, wait_all
from tests.chaos.worker_program import WorkerOptions
from tests.support.processes import wait_until
from tests.support.redis_servers import RestartableRedis, free_port

pytestmark = pytest.mark.chaos

SLOW = WorkerOptions(engine={"steps_per_request": 10, "step_s": 0.01})
REFUSES_FOR_S = 3.0


@contextmanager
def _out_of_memory(server: RestartableRedis, bare: redis.Redis) -> Iterator[None]:
    with redis_setting(bare, "maxmemory", "1mb"):  # the server itself needs that much
        yield


@contextmanager
def _no_snapshots(server: RestartableRedis, bare: redis.Redis) -> Iterator[None]:
    """MISCONF of a snapshot that fails: nobody can write a file in /proc."""
    with redis_setting(bare, "save", "3600 1"), redis_setting(bare, "dir", "/proc"):
        bare.bgsave()
        _wait_for(bare, "rdb_last_bgsave_status", "err")
        yield
    # After `save ""` nothing is refused any more.


@contextmanager
def _disk_full(server: RestartableRedis, bare: redis.Redis) -> Iterator[None]:
    """MISCONF of the append-only file: it may not grow, which write() reports like a full disk."""
    with server.no_larger_files():
        wait_until(lambda: not _is_writable(bare))
        yield
    wait_until(lambda: _is_writable(bare), timeout_s=20)
    bare.delete("filler")


@contextmanager
def _replica(server: RestartableRedis, bare: redis.Redis) -> Iterator[None]:
    """READONLY, as after a failover; its primary is a dead port, so that its data stays."""
    bare.replicaof("127.0.0.1", free_port())
    try:
        yield
    finally:
        bare.replicaof("NO", "ONE")


def _wait_for(bare: redis.Redis, name: str, value: str) -> None:
    wait_until(lambda: bare.info("persistence")[name] == value)


def _is_writable(bare: redis.Redis) -> bool:
    try:
        return bool(bare.set("filler", "x" * 10_000))
    except redis.RedisError:
        return False


REFUSALS: dict[str, tuple[Callable[[RestartableRedis, redis.Redis], AbstractContextManager[None]], str]] = {
    "out of memory": (_out_of_memory, "OOM|command not allowed"),
    "snapshots fail": (_no_snapshots, "MISCONF|unable to persist|RDB"),
    "disk full": (_disk_full, "MISCONF|AOF"),
    "replica": (_replica, "READONLY|read only|read-only"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_submit_is_refused_and_work_goes_on_when_redis_takes_writes_again(
    kind: str, durable_redis: RestartableRedis, tmp_path: Path
) -> None:
    refuse, message = REFUSALS[kind]
    with (
        running_fleet(durable_redis.url, tmp_path, SLOW) as fleet,
        impatient_client(durable_redis.url) as client,
        redis.Redis.from_url(durable_redis.url) as bare,
    ):
        fleet.start()
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=3, num_prompts=80)
        (first, *_) = jobs
        wait_until(lambda: client.status(first).request_counts.finished > 0)
        with refuse(durable_redis, bare):
            with pytest.raises(redis.RedisError, match=message):
                client.submit(prompts(3))
            before = [client.status(job_id).request_counts.finished for job_id in jobs]
            time.sleep(REFUSES_FOR_S)
            assert [client.status(job_id).request_counts.finished for job_id in jobs] == before
        wait_all(client, jobs)
        jobs |= insist(lambda: submit_jobs(client, num_jobs=1, num_prompts=3))
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert fleet.stop() == [0]
        assert fleet.num_restarts == 0
