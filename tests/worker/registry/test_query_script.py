"""Scripts of exchanges: one round trip, and what happens in a Redis that does not have them."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry.connect import connect_async
from worker.registry.exchange import perform, perform_async
from worker.registry.jobs import JobQueries, ResultOrder, ResultPage
from worker.registry.keys import UnitRef

EXPECTED = ResultPage([b"0", b"1"], cursor=2, is_last=True, has_ended=True)


@pytest.fixture
def job_id(registry: TestRegistry) -> str:
    job_id = registry.running_job(range(2))
    leases = registry.leases()
    leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [ok(index, f"{index}") for index in range(2)])
    return job_id


@pytest.mark.parametrize("order", list(ResultOrder))
def test_a_page_is_one_command_in_one_exchange(registry: TestRegistry, job_id: str, order: ResultOrder) -> None:
    exchange = JobQueries(registry.keys).page(job_id, 0, order)
    [command] = next(exchange)
    assert command[0] == "EVALSHA"
    with pytest.raises(StopIteration) as end:
        exchange.send([[1, 1, 0, [b"record"]]])
    assert end.value.value == ResultPage([b"record"], cursor=1, is_last=True, has_ended=False)


def test_a_redis_that_lost_its_scripts_is_given_them_again(registry: TestRegistry, job_id: str) -> None:
    queries = JobQueries(registry.keys)
    for _ in range(2):
        registry.redis.script_flush()
        assert perform(registry.redis, queries.page(job_id, 0, ResultOrder.COMPLETION)) == EXPECTED


def test_a_reader_in_an_event_loop_gives_them_too(registry: TestRegistry, job_id: str) -> None:
    async def page() -> ResultPage:
        async with connect_async(registry.settings) as client:
            return await perform_async(client, JobQueries(registry.keys).page(job_id, 0, ResultOrder.INPUT))

    registry.redis.script_flush()
    assert asyncio.run(page()) == EXPECTED
