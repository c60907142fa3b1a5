"""A job of the lines that failed in an earlier one, and jobs that are deleted, where no worker runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from tests.support.registry import LINES, NAMED, TestRegistry, ended_job
from worker.async_client import AsyncBatchClient
from worker.client import BatchClient
from worker.lines.request_line import Endpoint
from worker.registry.errors import InvalidOption, JobNotEnded, JobNotFound, LinesForgotten, NothingToRetry
from worker.schemas import JobState, SubmitOptions


def lines_of(registry: TestRegistry, job_id: str) -> Sequence[bytes | None]:
    return registry.leases().lines(job_id, range(registry.status(job_id).request_counts.total))


def test_a_retry_is_a_job_of_the_lines_that_failed(client: BatchClient, registry: TestRegistry) -> None:
    job_id = ended_job(registry, {1: ("b", "internal_error"), 2: (None, "invalid_json_line")})

    retried_id = client.retry(job_id)

    assert retried_id != job_id
    assert client.status(retried_id).status is JobState.VALIDATING
    assert lines_of(registry, retried_id) == [NAMED, b"{bad"]


def test_a_line_without_a_custom_id_keeps_the_one_of_its_record(client: BatchClient, registry: TestRegistry) -> None:
    failed = {0: ("line-1", "internal_error"), 3: ("line-4", "invalid_value"), 5: ("line-6", "missing_parameter")}
    job_id = ended_job(registry, failed)

    lines = lines_of(registry, client.retry(job_id))

    assert lines[0] == b'{"custom_id":"line-1","prompt": "a"}'
    assert [json.loads(line or b"") for line in lines[1:]] == [
        {"custom_id": "line-4", "prompt": "c", "n": 0},
        {"custom_id": "line-6"},
    ]


def test_a_line_whose_custom_id_was_taken_is_left_out(client: BatchClient, registry: TestRegistry) -> None:
    taken = {4: ("b", "duplicate_custom_id")}

    retried_id = client.retry(ended_job(registry, {0: ("line-1", "internal_error"), **taken}))

    assert client.status(retried_id).request_counts.total == 1
    with pytest.raises(NothingToRetry, match="has failed but 1 whose custom_id an earlier line has"):
        client.retry(ended_job(registry, taken))


def test_a_retry_has_the_options_of_the_first_job_or_its_own(client: BatchClient, registry: TestRegistry) -> None:
    options = SubmitOptions(
        priority=2, deadline_s=1800.5, tenant="blue", metadata={"run": "7"}, endpoint=Endpoint.COMPLETIONS, strict=True,
        result_ttl_s=7200,
    )  # fmt: skip
    job_id = ended_job(registry, {0: ("line-1", "internal_error")}, options)

    registry.redis.hset(registry.keys.job(job_id), "model", "the one that answered")

    same = client.status(client.retry(job_id))
    other = client.status(client.retry(job_id, priority=7, deadline_s=60, model="another"))

    assert (same.model, other.model) == ("the one that answered", "another")
    assert (same.priority, same.tenant, same.metadata) == (2, "blue", {"run": "7"})
    assert (same.expires_at or 0) - same.created_at == pytest.approx(1800.5)
    assert registry.redis.hmget(registry.keys.job(same.id), "url", "strict", "retain") == [
        b"/v1/completions", b"1", b"7200000",
    ]  # fmt: skip
    assert (other.priority, other.tenant) == (7, "blue")
    assert (other.expires_at or 0) - other.created_at == pytest.approx(60)


def test_an_option_of_a_retry_is_refused_as_one_of_a_submit_is(client: BatchClient, registry: TestRegistry) -> None:
    job_id = ended_job(registry, {0: ("line-1", "internal_error")})

    with pytest.raises(InvalidOption, match=r"^priority is 10; accepted: a whole number, 0 to 9$"):
        client.retry(job_id, priority=10)
    assert len(client.jobs()) == 1


def test_what_a_cancelled_job_left_undone_is_retried(client: BatchClient, registry: TestRegistry) -> None:
    job_id = client.submit(LINES[:2])
    client.cancel(job_id)

    assert [line is not None for line in lines_of(registry, client.retry(job_id))] == [True, True]


def test_a_retry_of_more_than_a_page_loses_no_line(client: BatchClient, registry: TestRegistry) -> None:
    job_id = client.submit([b'{"prompt": "%d"}' % number for number in range(1100)])
    client.cancel(job_id)

    lines = lines_of(registry, client.retry(job_id))

    assert [json.loads(line or b"")["custom_id"] for line in lines] == [f"line-{number}" for number in range(1, 1101)]


def test_only_a_job_that_has_ended_is_retried_or_deleted(client: BatchClient, registry: TestRegistry) -> None:
    job_id = client.submit(LINES)

    for act in (client.retry, client.delete):
        with pytest.raises(JobNotEnded, match="is validating; accepted: a job that has ended"):
            act(job_id)

    assert client.status(job_id).request_counts.total == len(LINES)
    assert None not in lines_of(registry, job_id)


def test_a_job_without_failed_lines_has_nothing_to_retry(client: BatchClient, registry: TestRegistry) -> None:
    with pytest.raises(NothingToRetry, match=r"no line of job .* has failed; accepted"):
        client.retry(ended_job(registry, {}))
    assert len(client.jobs()) == 1


def test_lines_that_an_older_worker_dropped_cannot_be_retried(client: BatchClient, registry: TestRegistry) -> None:
    job_id = ended_job(registry, {0: ("line-1", "internal_error")})
    registry.redis.delete(registry.keys.lines(job_id))

    with pytest.raises(LinesForgotten, match="were not kept; submit them from their file"):
        client.retry(job_id)
    assert len(client.jobs()) == 1


def test_failed_lines_stay_as_long_as_the_records_and_others_go(registry: TestRegistry) -> None:
    some, none = ended_job(registry, {0: ("line-1", "internal_error")}), ended_job(registry, {})
    keys, ttl = registry.keys, registry.redis.ttl

    assert registry.redis.hkeys(keys.lines(some)) == [b"0"]
    assert ttl(keys.lines(some)) == pytest.approx(ttl(keys.records(some)), abs=2)
    assert not registry.redis.exists(keys.lines(none))


def test_a_deleted_job_leaves_nothing_behind(client: BatchClient, registry: TestRegistry) -> None:
    kept = ended_job(registry, {})
    before = set(registry.redis.keys("*"))
    options = SubmitOptions(idempotency_key="tonight")
    job_id = ended_job(registry, {0: ("line-1", "internal_error")}, options)

    client.delete(job_id)

    assert set(registry.redis.keys("*")) == before
    assert [job.id for job in client.jobs()] == [kept]
    for act in (client.status, client.delete, client.retry):
        with pytest.raises(JobNotFound):
            act(job_id)


def test_deleting_a_job_leaves_a_later_ones_key_alone(client: BatchClient, registry: TestRegistry) -> None:
    options = SubmitOptions(idempotency_key="tonight")
    first = ended_job(registry, {}, options)
    registry.redis.delete(registry.keys.idempotency("default", "tonight"))  # as if its time had passed
    second = client.submit(LINES, idempotency_key="tonight")

    client.delete(first)

    assert client.submit(LINES, idempotency_key="tonight") == second


def test_the_asynchronous_client_retries_and_deletes(redis_url: str, registry: TestRegistry) -> None:
    job_id = ended_job(registry, {1: ("b", "internal_error")})

    async def act() -> str:
        async with AsyncBatchClient(redis_url) as client:
            retried_id = await client.retry(job_id, priority=1)
            await client.delete(job_id)
            return retried_id

    retried_id = asyncio.run(act())
    assert lines_of(registry, retried_id) == [NAMED]
    assert [job.id for job in registry.jobs()] == [retried_id]
