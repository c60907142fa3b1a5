"""Bad networks between worker and Redis: connections that die silently, partitions, slowness and resets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.jobs import check_invariants, impatient_client, submit_jobs, wait_all, was_claimed_again
from tests.chaos.worker_program import WorkerOptions
from tests.support.processes import wait_until
from tests.support.redis_servers import RestartableRedis, TcpProxy, tcp_proxy
from worker.client import BatchClient

pytestmark = pytest.mark.timeout(240)

SLOW = WorkerOptions(engine={"steps_per_request": 10, "step_s": 0.01})
RECOVERY_S = 60.0
# Celery's loop notices the silence after 21 s and gives its connection up 30 s later; then threads end, 37 s at most.
ORDERLY_END_S = 120.0


@pytest.fixture
def proxy(forgetful_redis: RestartableRedis) -> Iterator[TcpProxy]:
    with tcp_proxy(forgetful_redis.port) as proxy:
        yield proxy


@pytest.fixture
def client(forgetful_redis: RestartableRedis) -> Iterator[BatchClient]:
    """A client beside the proxy: the producer's network is well."""
    with impatient_client(forgetful_redis.url) as client:
        yield client


@pytest.fixture
def bare(forgetful_redis: RestartableRedis) -> Iterator[redis.Redis]:
    with redis.Redis(port=forgetful_redis.port) as bare:
        yield bare


@pytest.fixture
def fleet(proxy: TcpProxy, client: BatchClient, tmp_path: Path) -> Iterator[Fleet]:
    """Two workers behind the proxy."""
    with running_fleet(f"redis://127.0.0.1:{proxy.port}/0", tmp_path, SLOW) as fleet:
        for _ in range(2):
            fleet.start()
        fleet.wait_up(client)
        yield fleet


@pytest.mark.chaos
def test_messages_popped_into_half_open_connections_are_announced_again(
    proxy: TcpProxy, fleet: Fleet, client: BatchClient, bare: redis.Redis
) -> None:
    early = submit_jobs(client, num_jobs=1, num_prompts=60)
    assert proxy.kill_half() > 0
    jobs = early | submit_jobs(client, num_jobs=3, num_prompts=40)
    wait_all(client, jobs, RECOVERY_S)
    check_invariants(client, bare, jobs)
    assert fleet.stop() == [0, 0]
    assert fleet.num_restarts == 0


@pytest.mark.parametrize("partition_s", [3.0, pytest.param(60.0, marks=pytest.mark.chaos)])
def test_workers_consume_again_after_a_time_without_network(
    partition_s: float, proxy: TcpProxy, fleet: Fleet, client: BatchClient, bare: redis.Redis
) -> None:
    jobs = submit_jobs(client, num_jobs=2, num_prompts=60)
    with proxy.partition():
        time.sleep(partition_s)
        jobs |= submit_jobs(client, num_jobs=2, num_prompts=40)
    wait_all(client, jobs, RECOVERY_S)
    check_invariants(client, bare, jobs)
    assert fleet.stop() == [0, 0]
    assert fleet.num_restarts == 0


@pytest.mark.chaos
def test_200_ms_of_latency_and_one_reset_in_a_hundred_chunks_lose_nothing(
    proxy: TcpProxy, fleet: Fleet, client: BatchClient, bare: redis.Redis
) -> None:
    proxy.latency_s, proxy.reset_probability = 0.1, 0.01  # in each direction
    jobs = submit_jobs(client, num_jobs=4, num_prompts=40)
    wait_all(client, jobs, 90)
    proxy.latency_s, proxy.reset_probability = 0.0, 0.0
    check_invariants(client, bare, jobs)
    assert fleet.stop() == [0, 0]


@pytest.mark.chaos
def test_records_of_a_worker_that_lost_its_shard_are_fenced_off(
    forgetful_redis: RestartableRedis, proxy: TcpProxy, client: BatchClient, bare: redis.Redis, tmp_path: Path
) -> None:
    # One shard at a time, two of its ten prompts every 0.1 s: what is under way is the first of what the other runs.
    slow = WorkerOptions(engine={"steps_per_request": 10, "step_s": 0.01, "slots": 2})
    with running_fleet(forgetful_redis.url, tmp_path, slow, {"worker.concurrency": "1"}) as fleet:
        fleet.start(redis__url=f"redis://127.0.0.1:{proxy.port}/0")
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=1, num_prompts=30)
        (job_id,) = jobs
        wait_until(lambda: client.status(job_id).request_counts.finished > 0)
        with proxy.partition():
            fleet.start()
            wait_until(lambda: was_claimed_again(bare))
            before = client.status(job_id).request_counts.finished
            wait_until(lambda: client.status(job_id).request_counts.finished >= before + 2)
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert fleet.stop() == [0, 0]
        assert fleet.num_restarts == 0


@pytest.mark.chaos
@pytest.mark.parametrize("silence_s", [3.0, 40.0])
def test_a_worker_that_sends_events_ends_on_sigterm_though_redis_hangs(
    proxy: TcpProxy, client: BatchClient, tmp_path: Path, silence_s: float
) -> None:
    settings = {"worker.send_events": "true", "worker.drain_timeout_s": "1"}
    with running_fleet(f"redis://127.0.0.1:{proxy.port}/0", tmp_path, SLOW, settings) as fleet:
        worker = fleet.start(is_supervised=False)
        fleet.wait_up(client)
        with proxy.partition():
            time.sleep(silence_s)  # Celery's heartbeat, every 2 s, meets the silence
            worker.terminate()
            assert worker.wait(ORDERLY_END_S) == 0
