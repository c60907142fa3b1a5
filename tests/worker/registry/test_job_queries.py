"""Pages of records, in either order, from jobs in every state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry import job_queries
from worker.registry.claim import Claim
from worker.registry.errors import JobNotFound
from worker.registry.exchange import perform
from worker.registry.job_queries import JobQueries
from worker.registry.result_order import ResultOrder
from worker.registry.result_page import ResultPage
from worker.registry.unit_ref import UnitRef

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

    def page(self, cursor: int, order: ResultOrder = ResultOrder.INPUT, limit: int = 500) -> ResultPage:
        exchange = JobQueries(self.registry.keys).page(self.job_id, cursor, order, limit)
        return perform(self.registry.redis, exchange)


@pytest.fixture
def pages(registry: TestRegistry) -> Pages:
    return Pages(registry)


def numbers(page: ResultPage) -> list[int]:
    return [int(record) for record in page.records]


def test_completion_order_is_that_of_writing_and_the_cursor_counts_records(pages: Pages) -> None:
    pages.write(4, 0, 3)
    first = pages.page(0, ResultOrder.COMPLETION, limit=2)
    assert (numbers(first), first.cursor, first.is_last, first.has_ended) == ([4, 0], 2, False, False)
    second = pages.page(2, ResultOrder.COMPLETION, limit=2)
    assert (numbers(second), second.cursor, second.is_last) == ([3], 3, True)


def test_input_order_ends_before_the_first_line_that_is_not_done(pages: Pages) -> None:
    pages.write(4, 1, 0, 3)
    page = pages.page(0)
    assert (numbers(page), page.cursor, page.is_last, page.has_ended) == ([0, 1], 2, True, False)
    assert numbers(pages.page(2)) == []
    pages.write(2)
    assert numbers(pages.page(2)) == [2, 3, 4]


def test_an_ended_job_is_read_to_its_end_in_pages(pages: Pages) -> None:
    pages.write(*reversed(range(NUM_LINES)))
    read: list[tuple[Sequence[int], bool]] = []
    cursor = 0
    while not read or not read[-1][1]:
        page = pages.page(cursor, limit=4)
        assert page.has_ended
        read.append((numbers(page), page.is_last))
        cursor = page.cursor
    assert read == [([0, 1, 2, 3], False), ([4, 5], True)]
    assert numbers(pages.page(NUM_LINES)) == numbers(pages.page(10**9)) == []


def test_a_page_in_input_order_has_a_bound_in_bytes(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queries, "PAGE_BYTES", 100)
    pages.write(0, 1, 2, size=40)
    pages.write(3, size=400)
    pages.write(4, 5)
    found, cursor = [], 0
    while cursor < NUM_LINES:
        page = pages.page(cursor)
        found.append(numbers(page))
        cursor = page.cursor
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
