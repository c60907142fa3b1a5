"""Real worker processes: Celery, Redis and all, but the engine."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from settings import Settings
from tests.support.fake_engine import BREAK, FAIL, HANG, KILL, answer
from tests.support.processes import wait_until
from tests.support.registry import TestRegistry
from tests.support.workers import FAKE_WORKER_STOP_TIMEOUT_S, WorkerProcesses
from worker.app import create_app
from worker.broker.messages import Announcer
from worker.client import BatchClient
from worker.registry.keys import UnitRef
from worker.runtime.lease_keeper import WATCH_INTERVAL_S
from worker.schemas import JobState

WAIT_S = 30
SLOW = {"steps_per_request": 20, "step_s": 0.01, "slots": 4}
ENDLESS = {"steps_per_request": 1_000_000, "step_s": 0.01}


def _stopping_after(num_answers: int, directory: Path) -> dict[str, object]:
    """An engine that stops answering after so many, so that its job is half done whatever the machine."""
    return {"answers_before_gate": num_answers, "gate": str(directory / "never")}


def _prompts(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"prompt {number}"} for number in range(count)]


def _texts(records: list[dict[str, Any]]) -> dict[str, str]:
    return {record["custom_id"]: record["response"]["body"]["choices"][0]["text"] for record in records}


def _answers(count: int) -> dict[str, str]:
    return {f"line-{number + 1}": answer(f"prompt {number}") for number in range(count)}


def _owners(registry: TestRegistry, job_id: str) -> set[object]:
    """The workers that hold a shard of the job."""
    shards = (UnitRef.shard(job_id, number) for number in range(registry.status(job_id).shards_total))
    units = [registry.redis.hmget(registry.keys.unit(shard), "st", "own") for shard in shards]
    return {owner for state, owner in units if state == b"running"}


def _check_nothing_is_left(registry: TestRegistry) -> None:
    # Together: a message that finds no slot is in a lane again for a moment.
    wait_until(
        lambda: not (registry.redis.exists("unacked", "unacked_index") or registry.redis.keys("millrace*\x06\x16*"))
    )
    assert registry.redis.zcard(registry.keys.open) == 0
    counters = registry.redis.hgetall(registry.keys.counters)
    assert [counters[name] for name in (b"prompts", b"bytes", b"jobs")] == [b"0", b"0", b"0"]
    for key in registry.redis.scan_iter("millrace:{s0}:j:*"):
        assert registry.redis.ttl(key) > 0, key


def test_two_workers_share_a_job_and_sigterm_ends_them_cleanly(
    client: BatchClient, workers: WorkerProcesses, registry: TestRegistry, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    engine = {"step_s": 0.02, "slots": 5, "gate": str(gate)}
    processes = [workers.start(engine=engine, worker__lease_s="30") for _ in range(2)]
    workers.wait_up(client)
    bad: list[Any] = [b"{", b'{"custom_id": "line-7", "prompt": "twice"}', {"prompt": FAIL}]
    job_id = client.submit([*_prompts(300), *bad])
    wait_until(lambda: len(_owners(registry, job_id)) == 2)  # of 31 shards each has four slots full
    gate.touch()
    records = list(client.results(job_id, follow=True))
    job = client.status(job_id)
    assert (job.status, job.request_counts.completed, job.request_counts.failed) == (JobState.COMPLETED, 300, 3)
    assert len({record["id"] for record in records}) == 303
    answered = [record for record in records if record["response"]["status_code"] == 200]
    assert _texts(answered) == _answers(300)
    assert len(list(client.errors(job_id))) == 3
    wait_until(lambda: [worker.steps > 0 for worker in client.workers()] == [True, True])  # both of them worked
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(FAKE_WORKER_STOP_TIMEOUT_S) for process in processes] == [0, 0]
    assert client.workers() == []
    _check_nothing_is_left(registry)


def test_a_killed_workers_job_is_finished_by_another(
    client: BatchClient, workers: WorkerProcesses, registry: TestRegistry, tmp_path: Path
) -> None:
    first = workers.start(engine=SLOW | _stopping_after(20, tmp_path))
    workers.wait_up(client)
    job_id = client.submit(_prompts(60))
    wait_until(lambda: client.status(job_id).request_counts.completed >= 8)
    first.kill()
    first.wait()
    before = list(client.results(job_id))
    assert 8 <= len(before) < 60
    workers.start()
    assert client.wait(job_id, WAIT_S).status is JobState.COMPLETED
    records = list(client.results(job_id))
    assert records[: len(before)] == before
    assert _texts(records) == _answers(60)
    assert len(records) == 60
    assert registry.redis.zcard(registry.keys.open) == 0


def test_cancel_keeps_finished_results_and_stops_the_rest_within_a_second(
    client: BatchClient, workers: WorkerProcesses, registry: TestRegistry, tmp_path: Path
) -> None:
    assert WATCH_INTERVAL_S < 1  # what a worker takes to see it; how long the rest takes is the machine's affair
    workers.start(engine=SLOW | _stopping_after(20, tmp_path))
    job_id = client.submit(_prompts(300))
    wait_until(lambda: client.status(job_id).request_counts.completed >= 4)
    client.cancel(job_id)
    job = client.wait(job_id, timeout_s=WAIT_S)
    assert job.status is JobState.CANCELLED
    records = list(client.results(job_id))
    answered = [record for record in records if record["error"] is None]
    assert len(records) == 300
    assert 4 <= len(answered) == job.request_counts.completed < 300
    assert {record["error"]["code"] for record in records if record["error"]} == {"batch_cancelled"}
    wait_until(lambda: client.workers()[0].open_requests == 0)
    _check_nothing_is_left(registry)


def test_a_deadline_ends_a_job_that_runs(client: BatchClient, workers: WorkerProcesses) -> None:
    workers.start(engine=ENDLESS)
    workers.wait_up(client)
    job_id = client.submit(_prompts(30), deadline_s=1.0)
    job = client.wait(job_id, timeout_s=WAIT_S)
    assert (job.status, job.request_counts.failed) == (JobState.EXPIRED, 30)
    assert {record["error"]["code"] for record in client.results(job_id)} == {"batch_expired"}


def test_a_plain_celery_producer_gets_its_results(
    client: BatchClient, workers: WorkerProcesses, redis_url: str, registry: TestRegistry
) -> None:
    job_id, refused_id = f"s0-{uuid.uuid4()}", f"s0-{uuid.uuid4()}"
    producer = Celery(broker=redis_url, set_as_current=False)
    with redis.Redis.from_url(redis_url) as plain:
        lines = {str(index): f'{{"prompt": "prompt {index}"}}' for index in range(25)}
        plain.hset(f"millrace:{{s0}}:j:{job_id}:in", mapping=lines)
    options = {"n": 25, "metadata": {"from": "celery"}, "tenant": "plain"}
    producer.send_task("millrace.submit", args=[job_id], kwargs=options, queue="millrace")
    producer.send_task("millrace.submit", args=[refused_id], kwargs={"n": 1, "priority": 99}, queue="millrace")
    producer.send_task("millrace.submit", args=["nonsense"], kwargs={"n": 1}, queue="millrace")
    producer.close()
    workers.start()
    wait_until(
        lambda: registry.redis.exists(registry.keys.job(job_id), registry.keys.job(refused_id)) == 2, timeout_s=20
    )
    job = client.wait(job_id, WAIT_S)
    assert (job.status, job.tenant, job.metadata) == (JobState.COMPLETED, "plain", {"from": "celery"})
    assert _texts(list(client.results(job_id))) == _answers(25)
    refused = client.status(refused_id)
    assert refused.status is JobState.FAILED
    assert "priority" in (refused.error or "")


def test_copies_of_a_live_shards_message_do_not_run_it_again(
    client: BatchClient, workers: WorkerProcesses, registry: TestRegistry, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    for _ in range(2):
        workers.start(engine=SLOW | {"gate": str(gate)}, worker__concurrency="8", worker__lease_s="30")
    workers.wait_up(client)
    job_id = client.submit(_prompts(20))
    wait_until(lambda: client.status(job_id).shards_total == 2)
    shard = registry.keys.unit(UnitRef.shard(job_id, 0))
    wait_until(lambda: registry.redis.hget(shard, "st") == b"running")
    announcer = Announcer(create_app(Settings(redis=registry.settings)))
    for _ in range(6):
        announcer.announce(UnitRef.shard(job_id, 0), 5)
    wait_until(lambda: registry.redis.llen("millrace.millrace\x06\x163") == 0)
    assert registry.redis.hget(shard, "fence") == b"1"
    gate.touch()
    assert client.wait(job_id, WAIT_S).request_counts.completed == 20
    _check_nothing_is_left(registry)


# The reaper does not look within a test: on a slow machine it may announce a shard that is about to be claimed.
UNLOOKED_AT = {"worker__lease_s": "30", "worker__reap_interval_s": "600"}


def test_sigterm_gives_back_what_the_drain_does_not_finish(
    client: BatchClient, workers: WorkerProcesses, registry: TestRegistry
) -> None:
    worker = workers.start(engine=ENDLESS, worker__drain_timeout_s="0.3", **UNLOOKED_AT)
    workers.wait_up(client)
    job_id = client.submit(_prompts(10))
    shard = registry.keys.unit(UnitRef.shard(job_id, 0))
    wait_until(lambda: registry.redis.hget(shard, "st") == b"running")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(FAKE_WORKER_STOP_TIMEOUT_S) == 0
    assert registry.redis.hmget(shard, "st", "att") == [b"queued", b"0"]
    assert not registry.redis.exists("unacked")
    assert registry.redis.llen("millrace.millrace\x06\x163") == 1  # the message is back
    workers.start()
    assert client.wait(job_id, WAIT_S).request_counts.completed == 10


def test_sigquit_gives_everything_back_at_once(
    client: BatchClient, workers: WorkerProcesses, registry: TestRegistry
) -> None:
    worker = workers.start(engine=ENDLESS, worker__drain_timeout_s="60", **UNLOOKED_AT)
    workers.wait_up(client)
    job_id = client.submit(_prompts(30))
    shards = [registry.keys.unit(UnitRef.shard(job_id, number)) for number in range(3)]
    wait_until(lambda: all(registry.redis.hget(shard, "st") == b"running" for shard in shards))
    worker.send_signal(signal.SIGQUIT)
    assert worker.wait(FAKE_WORKER_STOP_TIMEOUT_S) == 0  # half of what a drain would take
    for shard in shards:
        assert registry.redis.hmget(shard, "st", "att") == [b"queued", b"0"]
    assert not registry.redis.exists("unacked")
    assert registry.redis.llen("millrace.millrace\x06\x163") == 3


def test_a_broken_engine_costs_an_attempt_and_ends_the_worker_with_70(
    client: BatchClient, workers: WorkerProcesses, registry: TestRegistry
) -> None:
    job_id = client.submit([{"prompt": BREAK}, {"prompt": "innocent"}])
    # In company, alone, and twice more without its innocent neighbour.
    codes = [workers.start(worker__max_attempts="3").wait(FAKE_WORKER_STOP_TIMEOUT_S) for _ in range(4)]
    assert codes == [70, 70, 70, 70]
    workers.start(worker__max_attempts="3")
    job = client.wait(job_id, WAIT_S)
    assert job.status is JobState.COMPLETED
    [error] = client.errors(job_id)
    assert (error["custom_id"], error["response"]["body"]["error"]["code"]) == ("line-1", "worker_lost")
    assert (job.request_counts.completed, job.request_counts.failed) == (1, 1)


def test_a_prompt_that_kills_its_worker_is_lost_after_max_attempts(
    client: BatchClient, workers: WorkerProcesses
) -> None:
    job_id = client.submit([{"prompt": KILL}])
    for _ in range(2):
        assert workers.start(worker__max_attempts="2", worker__lease_s="0.5").wait(FAKE_WORKER_STOP_TIMEOUT_S) == -9
    workers.start(worker__max_attempts="2")
    assert client.wait(job_id, WAIT_S).request_counts.failed == 1


def test_a_worker_that_hangs_loses_its_lease_to_another(
    client: BatchClient, workers: WorkerProcesses, registry: TestRegistry
) -> None:
    def start(hang_timeout_s: str) -> None:
        workers.start(worker__max_attempts="1", worker__drain_timeout_s="0", worker__hang_timeout_s=hang_timeout_s)

    start("1")
    workers.wait_up(client)
    job_id = client.submit([{"prompt": HANG}])
    shard = registry.keys.unit(UnitRef.shard(job_id, 0))
    wait_until(lambda: registry.redis.hget(shard, "st") == b"running")
    start("5")
    wait_until(lambda: registry.redis.hget(shard, "alone") == b"1")  # the second worker hangs by itself
    workers.start(worker__max_attempts="1")
    job = client.wait(job_id, WAIT_S)  # by the third, whose claim finds no attempt left
    assert (job.status, job.request_counts.failed) == (JobState.COMPLETED, 1)


def test_without_redis_a_worker_does_not_start(workers: WorkerProcesses) -> None:
    worker = workers.start(redis__url="redis://127.0.0.1:1/0")
    assert worker.wait(FAKE_WORKER_STOP_TIMEOUT_S) == 1
    assert "ConnectionError" in workers.log()


def test_a_thread_that_breaks_ends_the_worker_with_70(workers: WorkerProcesses, registry: TestRegistry) -> None:
    job_id = registry.running_job([0])
    registry.control.cancel(job_id)
    registry.redis.hset(registry.keys.job(job_id), "pri", "no number")  # the reaper stumbles over it
    worker = workers.start()
    assert worker.wait(FAKE_WORKER_STOP_TIMEOUT_S) == 70
    assert "the thread reaper broke" in workers.log()


def test_shards_that_fill_every_slot_do_not_hide_a_new_job(
    client: BatchClient, workers: WorkerProcesses, registry: TestRegistry
) -> None:
    workers.start(engine=ENDLESS, worker__concurrency="2", worker__drain_timeout_s="0", worker__lease_s="30")
    workers.wait_up(client)
    busy = client.submit(_prompts(80))  # two shards run, six wait
    shards = [registry.keys.unit(UnitRef.shard(busy, number)) for number in range(8)]

    def num_running() -> int:
        return [registry.redis.hget(shard, "st") for shard in shards].count(b"running")

    wait_until(lambda: num_running() == 2)
    job_id = client.submit(_prompts(1))
    wait_until(lambda: client.status(job_id).shards_total == 1)

    def num_pushed() -> int:
        return int(registry.redis.info("commandstats")["cmdstat_lpush"]["calls"])

    began_s, before = registry.time_s(), num_pushed()
    wait_until(lambda: registry.time_s() > began_s + 1 and num_pushed() > before)
    # Messages go round, but not without rest.
    assert num_pushed() - before <= 8 * (registry.time_s() - began_s)
    assert num_running() == 2
