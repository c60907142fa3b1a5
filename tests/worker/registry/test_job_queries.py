"""Pages of records, in either order, from jobs in every state; the list of jobs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry import jobs as job_queries
from worker.registry.errors import JobNotFound
from worker.registry.exchange import perform
from worker.registry.jobs import JobQueries, ResultOrder, ResultPage
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim

NUM_LINES = 6


class Pages:
    """A running job of six lines, its records and its pages."""

    def __init__(self, registry: TestRegistry) -> None:
        self.registry = registry
        self.job_id = registry.running_job(range(NUM_LINES))
        self.leases = registry.leases()
        self.shard: Claim = must_claim(self.leases, UnitRef.shard(self.job_id, 0))

    def write(self, *indices: int, size: int = 1) -> None:
        self.leases.put(self.shard, [ok(index, f"{index}".ljust(size)) for index in indices])

    def page(self, cursor: int, order: ResultOrder = ResultOrder.INPUT) -> ResultPage:
        return perform(self.registry.redis, JobQueries(self.registry.keys).page(self.job_id, cursor, order))


@pytest.fixture
def pages(registry: TestRegistry) -> Pages:
    return Pages(registry)


def numbers(page: ResultPage) -> list[int]:
    return [int(record) for record in page.records]


def test_completion_order_is_that_of_writing_and_the_cursor_counts_records(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queries, "PAGE_RECORDS", 2)
    pages.write(4, 0, 3)
    first = pages.page(0, ResultOrder.COMPLETION)
    assert (numbers(first), first.cursor, first.is_last, first.has_ended) == ([4, 0], 2, False, False)
    second = pages.page(2, ResultOrder.COMPLETION)
    assert (numbers(second), second.cursor, second.is_last) == ([3], 3, True)


def test_input_order_ends_before_the_first_line_that_is_not_done(pages: Pages) -> None:
    pages.write(4, 1, 0, 3)
    page = pages.page(0)
    assert (numbers(page), page.cursor, page.is_last, page.has_ended) == ([0, 1], 2, True, False)
    assert numbers(pages.page(2)) == []
    pages.write(2)
    assert numbers(pages.page(2)) == [2, 3, 4]


def test_an_ended_job_is_read_to_its_end_in_pages(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queries, "PAGE_RECORDS", 4)
    pages.write(*reversed(range(NUM_LINES)))
    read: list[tuple[Sequence[int], bool]] = []
    cursor = 0
    while not read or not read[-1][1]:
        page = pages.page(cursor)
        assert page.has_ended
        read.append((numbers(page), page.is_last))
        cursor = page.cursor
    assert read == [([0, 1, 2, 3], False), ([4, 5], True)]
    assert numbers(pages.page(NUM_LINES)) == numbers(pages.page(10**9)) == []


@pytest.mark.parametrize("order", list(ResultOrder))
def test_a_page_has_a_bound_in_bytes(pages: Pages, order: ResultOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queries, "PAGE_BYTES", 100)
    pages.write(0, 1, 2, size=40)
    pages.write(3, size=400)
    pages.write(4, 5)
    found, cursor, is_last = [], 0, False
    while not is_last:
        page = pages.page(cursor, order)
        found.append(numbers(page))
        cursor, is_last = page.cursor, page.is_last
    assert found == [[0, 1], [2], [3], [4, 5]]


@pytest.mark.parametrize("order", list(ResultOrder))
def test_records_that_expired_under_the_reader_are_no_empty_job(pages: Pages, order: ResultOrder) -> None:
    pages.write(*range(NUM_LINES))
    pages.registry.redis.delete(pages.registry.keys.records(pages.job_id))
    with pytest.raises(JobNotFound):
        pages.page(0, order)


def test_a_job_that_ended_without_some_records_is_read_over_the_gaps(pages: Pages) -> None:
    pages.write(1, 3)
    pages.registry.redis.hset(pages.registry.keys.job(pages.job_id), "st", "failed")
    page = pages.page(0)
    assert (numbers(page), page.cursor, page.is_last) == ([1, 3], NUM_LINES, True)


def test_a_job_that_ended_without_any_record_has_none(pages: Pages) -> None:
    pages.registry.redis.hset(pages.registry.keys.job(pages.job_id), "st", "failed")
    page = pages.page(0)
    assert (numbers(page), page.is_last, page.has_ended) == ([], True, True)


def _jobs(registry: TestRegistry, count: int) -> list[str]:
    """Oldest first."""
    job_ids = [registry.submit([b"x"]) for _ in range(count)]
    registry.redis.zadd(registry.keys.jobs, {job_id: number for number, job_id in enumerate(job_ids, 1)})
    return job_ids


def test_dropping_forgotten_jobs_skips_no_live_one(registry: TestRegistry) -> None:
    job_ids = _jobs(registry, 6)
    for job_id in job_ids[-2:]:
        registry.redis.delete(registry.keys.job(job_id))
    assert [job.id for job in registry.jobs(2)] == [job_ids[3], job_ids[2]]
    assert registry.redis.zcard(registry.keys.jobs) == 4


def test_the_newest_jobs_come_first_and_no_more_than_asked_for(registry: TestRegistry) -> None:
    job_ids = _jobs(registry, 3)
    assert [job.id for job in registry.jobs(2)] == [job_ids[2], job_ids[1]]
    assert [job.id for job in registry.jobs(10)] == job_ids[::-1]
    assert registry.jobs(0) == []
