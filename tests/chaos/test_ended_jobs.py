"""Jobs that are cancelled or expire, and producers that submit too much or poll too late."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis
from pydantic import SecretStr

from settings import LimitSettings, RedisSettings
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.jobs import check_counters, check_nothing_is_left, check_records, contents, prompts, undisturbed
from tests.chaos.worker_program import WorkerOptions
from tests.support.processes import wait_until
from worker.client import BatchClient
from worker.registry.errors import JobNotFound, JobTooLarge, QueueFull
from worker.registry.keys import Keys
from worker.schemas import JobState

pytestmark = pytest.mark.chaos

NUM_PROMPTS = 200
NUM_ANSWERS = 24
DEADLINE_S = 5.0  # long enough for the first answers
END_S = 90.0  # on a busy machine
LINES = prompts(NUM_PROMPTS)

MB = 1024 * 1024


def _fill_every_slot(client: BatchClient) -> None:
    busy = client.submit(prompts(NUM_PROMPTS, of="busy"), priority=0)
    wait_until(lambda: client.status(busy).request_counts.completed > 0)


def _cancel_others(client: BatchClient, job_id: str) -> None:
    for job in client.jobs():
        if job.id != job_id:
            client.cancel(job.id)


def _check(client: BatchClient, bare: redis.Redis, job_id: str, state: JobState, code: str) -> int:
    """Check that the job ends in time with a record for each prompt; how many have an answer."""
    job = client.wait(job_id, END_S)
    assert job.status is state
    check_records(client, bare, job_id, num_prompts=NUM_PROMPTS)
    check_nothing_is_left(bare)
    found, expected = contents(client.results(job_id)), undisturbed(LINES)
    failed = {name for name, record in found.items() if record["error"] is not None}
    assert {found[name]["error"]["code"] for name in failed} == {code}
    assert all(found[name] == expected[name] for name in found.keys() - failed)
    return NUM_PROMPTS - len(failed)


@pytest.mark.parametrize(
    ("end", "state", "code"),
    [
        ("cancel", JobState.CANCELLED, "batch_cancelled"),
        ("deadline", JobState.EXPIRED, "batch_expired"),
    ],
)
@pytest.mark.parametrize("phase", ["queued", "running"])
def test_a_job_that_is_ended_early_keeps_what_had_finished(
    end: str,
    state: JobState,
    code: str,
    phase: str,
    client: BatchClient,
    bare: redis.Redis,
    redis_url: str,
    tmp_path: Path,
) -> None:
    # No more than these of 200 prompts are answered: the job stays half done, and a busy worker busy.
    engine = {"step_s": 0.01, "answers_before_gate": NUM_ANSWERS, "gate": str(tmp_path / "never")}
    with running_fleet(redis_url, tmp_path, WorkerOptions(engine=engine)) as fleet:
        fleet.start()
        fleet.wait_up(client)
        if phase == "queued":
            _fill_every_slot(client)
        job_id = client.submit(LINES, deadline_s=DEADLINE_S if end == "deadline" else None)
        if phase == "running":
            wait_until(lambda: client.status(job_id).request_counts.completed > 0)
        if end == "cancel":
            client.cancel(job_id)
        else:
            wait_until(lambda: client.status(job_id).status.is_terminal)
        if phase == "queued":
            _cancel_others(client, job_id)
        num_answered = _check(client, bare, job_id, state, code)
        assert (num_answered > 0) == (phase == "running")
        assert fleet.stop() == [0]


def _used_bytes(bare: redis.Redis) -> int:
    return int(bare.info("memory")["used_memory"])


def test_a_full_queue_refuses_with_a_wait_and_keeps_its_memory_flat(bare: redis.Redis, redis_url: str) -> None:
    limits = LimitSettings(max_open_prompts=1000, max_prompts_per_job=500)
    with BatchClient(redis_url, limits=limits) as client:
        for number in range(2):
            client.submit(prompts(500, of=f"job {number}"))
        check_counters(bare)
        before = _used_bytes(bare)
        for _ in range(100):
            with pytest.raises(QueueFull) as refused:
                client.submit(prompts(500, of="too much " * 20))
            assert (refused.value.resource, refused.value.used, refused.value.limit) == ("prompts", 1000, 1000)
            assert 0 < refused.value.retry_after_s <= 3600
        assert _used_bytes(bare) - before < MB  # 100 jobs of 150 kB were refused
        check_counters(bare)


def test_a_job_that_is_too_large_is_refused_by_type_and_leaves_nothing(bare: redis.Redis, redis_url: str) -> None:
    limits = LimitSettings(max_prompts_per_job=50, max_prompt_bytes=1000, max_job_bytes=4000)
    with BatchClient(redis_url, limits=limits) as client:
        with pytest.raises(JobTooLarge, match=r"51 prompts or more, limit 50: raise limits.max_prompts_per_job"):
            client.submit(prompts(51))
        with pytest.raises(JobTooLarge, match=r"limit 4,000: raise limits.max_job_bytes"):
            client.submit([{"prompt": "x" * 900}] * 5)
    assert not list(bare.scan_iter(f"{Keys().prefix}*"))


def test_results_that_expire_while_they_are_read_are_a_typed_error(
    bare: redis.Redis, redis_url: str, fleet: Fleet
) -> None:
    fleet.start()
    settings = RedisSettings(url=SecretStr(redis_url), result_ttl_s=1)
    with BatchClient(settings) as client:
        job_id = client.submit(prompts(1200))
        records = client.results(job_id, follow=True)
        assert next(records)["error"] is None
        wait_until(lambda: not bare.exists(Keys().job(job_id)), timeout_s=20)
        with pytest.raises(JobNotFound):
            list(records)  # the page that was read, then the news


def test_a_producer_that_never_polls_costs_nothing_once_the_results_expire(
    bare: redis.Redis, redis_url: str, fleet: Fleet
) -> None:
    fleet.start()
    settings = RedisSettings(url=SecretStr(redis_url), result_ttl_s=2)
    before = _used_bytes(bare)
    with BatchClient(settings) as client:
        for number in range(5):
            job_id = client.submit(prompts(400, of=f"job {number}"), idempotency_key=str(number))
        client.wait(job_id, END_S)
        wait_until(lambda: not list(bare.scan_iter(f"{Keys().prefix}j:*")), timeout_s=END_S)
        assert client.jobs() == []
    check_nothing_is_left(bare)
    assert not list(bare.scan_iter(f"{Keys().prefix}idem:*"))
    assert _used_bytes(bare) - before < MB


def test_a_slow_reader_gets_every_record_once(bare: redis.Redis, client: BatchClient, fleet: Fleet) -> None:
    fleet.start()
    job_id = client.submit(prompts(2000))
    seen = []
    for record in client.results(job_id, follow=True):
        seen.append(record["custom_id"])
        if len(seen) % 500 == 0:
            time.sleep(1)
    assert sorted(seen) == sorted(line["custom_id"] for line in prompts(2000))
    check_nothing_is_left(bare)
