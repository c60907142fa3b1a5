"""The producer's client in an event loop, where no worker runs."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest

from settings import LimitSettings
from tests.support.registry import TestRegistry, must_claim, ok
from worker.async_client import AsyncBatchClient
from worker.registry.errors import EmptyJob, InvalidJobId, InvalidOption, JobNotFound, JobTooLarge
from worker.registry.keys import UnitRef
from worker.results import PollPauses
from worker.schemas import JobState, SubmitOptions

T = TypeVar("T")

ORDERS: tuple[Any, ...] = ("completion", "input")


class Loop:
    """Runs a coroutine with a client, in a loop of its own."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url

    def __call__(self, main: Callable[[AsyncBatchClient], Awaitable[T]], limits: LimitSettings | None = None) -> T:
        async def with_client() -> T:
            async with AsyncBatchClient(self._redis_url, limits=limits) as client:
                return await main(client)

        return asyncio.run(with_client())


@pytest.fixture
def loop(redis_url: str) -> Loop:
    return Loop(redis_url)


async def numbers(records: AsyncIterator[dict[str, Any]]) -> list[int]:
    return [record["i"] async for record in records]


async def rising(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        await asyncio.sleep(0)
        yield b"%d" % number


def test_lines_of_plain_and_of_asynchronous_iterables_are_staged_in_order(loop: Loop, registry: TestRegistry) -> None:
    async def submit_both(client: AsyncBatchClient) -> list[str]:
        plain = await client.submit([b"%d" % number for number in range(1201)], priority=3)
        return [plain, await client.submit(rising(1201), priority=3)]

    for job_id in loop(submit_both):
        assert registry.leases().lines(job_id, [0, 499, 500, 1000, 1200]) == [b"0", b"499", b"500", b"1000", b"1200"]
        status = registry.status(job_id)
        assert (status.request_counts.total, status.priority) == (1201, 3)
    assert registry.redis.llen("millrace") == 2


@pytest.mark.parametrize("count", [0, 500, 1000])
def test_an_asynchronous_iterable_that_ends_with_a_chunk_loses_nothing(
    loop: Loop, registry: TestRegistry, count: int
) -> None:
    if count == 0:
        with pytest.raises(EmptyJob):
            loop(lambda client: client.submit(rising(0)))
    else:
        job_id = loop(lambda client: client.submit(rising(count)))
        assert registry.status(job_id).request_counts.total == count


def test_errors_are_those_of_the_other_client_and_leave_nothing_behind(loop: Loop, registry: TestRegistry) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"1"
        raise ZeroDivisionError

    unknown = registry.keys.new_job_id()
    with pytest.raises(ZeroDivisionError):
        loop(lambda client: client.submit(failing()))
    with pytest.raises(JobTooLarge):
        loop(lambda client: client.submit(rising(3)), LimitSettings(max_prompts_per_job=2))
    with pytest.raises(InvalidOption):
        loop(lambda client: client.submit([b"x"], priority=10))
    with pytest.raises(JobNotFound):
        loop(lambda client: numbers(client.results(unknown)))
    assert registry.redis.keys("*:in") == []


@pytest.mark.parametrize("verb", [AsyncBatchClient.status, AsyncBatchClient.cancel, AsyncBatchClient.wait])
def test_a_job_that_is_not_there_is_an_error_to_every_verb(
    loop: Loop, registry: TestRegistry, verb: Callable[[AsyncBatchClient, str], Awaitable[object]]
) -> None:
    unknown = registry.keys.new_job_id()
    with pytest.raises(JobNotFound, match=unknown):
        loop(lambda client: verb(client, unknown))
    with pytest.raises(InvalidJobId):
        loop(lambda client: verb(client, "nonsense"))


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_cancelled_task_submits_nothing(loop: Loop, registry: TestRegistry, is_asynchronous: bool) -> None:
    goes_on, has_begun = threading.Event(), threading.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            has_begun.set()
            await asyncio.sleep(0.001)

    def stuck() -> Iterator[bytes]:
        yield b"x"
        has_begun.set()
        goes_on.wait(10)
        yield b"x"

    async def cancel_soon(client: AsyncBatchClient) -> None:
        task = asyncio.create_task(client.submit(endless() if is_asynchronous else stuck()))
        assert await asyncio.to_thread(has_begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        goes_on.set()

    loop(cancel_soon)
    assert registry.jobs(10) == []
    assert registry.redis.keys("*:in") == []


def test_submits_that_were_cancelled_but_go_on_leave_a_thread_for_cancel(
    loop: Loop, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.async_client.MAX_SUBMITS", 2)
    goes_on = threading.Event()
    has_begun = threading.Semaphore(0)
    job_id = registry.submit([b'{"prompt": "a"}'])

    def stuck() -> Iterator[bytes]:
        yield b"x"
        has_begun.release()
        goes_on.wait(10)

    async def cancel_beside_stuck_submits(client: AsyncBatchClient) -> JobState:
        try:
            for number in range(3):
                task = asyncio.create_task(client.submit(stuck()))
                if number < 2:
                    assert await asyncio.to_thread(has_begun.acquire, timeout=5)
                else:
                    await _until(lambda: client._submits._work_queue.qsize() > 0)  # it waits behind the two
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            async with asyncio.timeout(5):
                return (await client.cancel(job_id)).status
        finally:
            goes_on.set()

    assert loop(cancel_beside_stuck_submits) is JobState.CANCELLED
    assert [job.id for job in registry.jobs()] == [job_id]


def test_submits_whose_lines_need_the_default_threads_all_end(loop: Loop, registry: TestRegistry) -> None:
    count = min(32, (os.cpu_count() or 1) + 4)  # the threads of a loop's default executor

    async def lines() -> AsyncIterator[bytes]:
        for number in range(3):
            yield await asyncio.to_thread(b"%d".__mod__, number)

    async def submit_all(client: AsyncBatchClient) -> list[str]:
        async with asyncio.timeout(20):
            return await asyncio.gather(*(client.submit(lines()) for _ in range(count)))

    assert len(set(loop(submit_all))) == count
    assert len(registry.jobs(100)) == count


@pytest.mark.parametrize("ending", ["refused", "cancelled", "invalid"])
def test_a_generator_is_closed_however_its_submit_ends(loop: Loop, ending: str) -> None:
    ends: list[str] = []
    has_begun = asyncio.Event()

    async def lines() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
                has_begun.set()
                await asyncio.sleep(0.0001)
        finally:
            await asyncio.sleep(0)
            ends.append("closed")

    async def submit(client: AsyncBatchClient) -> None:
        generator = lines()
        if ending == "invalid":
            await anext(generator)
        submitting = asyncio.create_task(client.submit(generator, priority=99 if ending == "invalid" else 5))
        if ending == "cancelled":
            await has_begun.wait()
            submitting.cancel()
        try:
            await submitting
        except (JobTooLarge, asyncio.CancelledError, InvalidOption) as error:
            ends.append(type(error).__name__)

    loop(submit, LimitSettings(max_prompts_per_job=600) if ending == "refused" else None)
    name = {"refused": "JobTooLarge", "cancelled": "CancelledError", "invalid": "InvalidOption"}[ending]
    assert ends == ["closed", name]


def test_a_generator_runs_in_one_task_and_may_hold_a_timeout_open(loop: Loop, registry: TestRegistry) -> None:
    tasks: set[object] = set()

    async def lines() -> AsyncIterator[bytes]:
        async with asyncio.timeout(20):
            async for line in rising(1201):
                tasks.add(asyncio.current_task())
                yield line

    job_id = loop(lambda client: client.submit(lines()))
    assert registry.status(job_id).request_counts.total == 1201
    assert len(tasks) == 1


def test_one_line_in_place_of_lines_is_a_type_error(loop: Loop, registry: TestRegistry) -> None:
    ones: tuple[Any, ...] = (b"{}", "{}", {"prompt": "a"})
    for one in ones:
        with pytest.raises(TypeError, match=r"^lines is one (bytes|str|dict); accepted: an iterable of lines"):
            loop(partial(AsyncBatchClient.submit, lines=one))
    with pytest.raises(TypeError, match=r"^line 2 is of type int; accepted: "):
        loop(lambda client: client.submit([b"x", 3]))  # type: ignore[list-item]  # that is what is tested
    assert registry.redis.keys("*") == []


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every pause that a client has begun to make between two polls."""
    begun: list[float] = []
    next_s = PollPauses.next_s

    def noted(self: PollPauses) -> float:
        begun.append(next_s(self))
        return begun[-1]

    monkeypatch.setattr(PollPauses, "next_s", noted)
    return begun


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_results_come_in_either_order_while_the_job_runs(
    loop: Loop, registry: TestRegistry, pauses: list[float]
) -> None:
    job_id = registry.running_job([0, 1, 2])
    leases = registry.leases()
    shard = must_claim(leases, UnitRef.shard(job_id, 0))
    leases.put(shard, [ok(2, '{"i": 2}'), ok(0, '{"i": 0}')])

    async def read(client: AsyncBatchClient) -> None:
        assert await numbers(client.results(job_id)) == [2, 0]
        assert await numbers(client.results(job_id, cursor=1)) == [0]
        assert await numbers(client.results(job_id, order="input")) == [0]
        following = [asyncio.create_task(numbers(client.results(job_id, follow=True, order=order))) for order in ORDERS]
        waiting = asyncio.create_task(client.wait(job_id))
        await _until(lambda: len(pauses) >= 6)  # two of each task
        leases.put(shard, [ok(1, '{"i": 1}')])
        assert await asyncio.gather(*following) == [[2, 0, 1], [0, 1, 2]]
        assert (await waiting).status is JobState.COMPLETED
        with pytest.raises(ValueError, match="order is 'random'; accepted: completion, input"):
            client.results(job_id, order="random")  # type: ignore[arg-type]  # that is what is tested

    loop(read)


def test_cancelling_writes_error_records_and_waiting_has_an_end(loop: Loop, registry: TestRegistry) -> None:
    async def cancel(client: AsyncBatchClient) -> None:
        job_id = await client.submit([{"prompt": "a"}, b"{bad"])
        with pytest.raises(TimeoutError, match="0 of 2 prompts"):
            await client.wait(job_id, timeout_s=0.05)
        assert (await client.cancel(job_id)).status is JobState.CANCELLED
        errors = [record async for record in client.errors(job_id)]
        assert [record["custom_id"] for record in errors] == ["line-1", None]
        assert [job.id for job in await client.jobs()] == [job_id]
        assert await client.workers() == []

    loop(cancel)
    assert len(registry.jobs(10)) == 1


def test_many_jobs_are_followed_without_a_thread_for_each(
    loop: Loop, registry: TestRegistry, pauses: list[float]
) -> None:
    job_ids = [registry.running_job([0]) for _ in range(20)]

    async def follow_all(client: AsyncBatchClient) -> int:
        waiting = [asyncio.create_task(client.wait(job_id)) for job_id in job_ids]
        await _until(lambda: len(pauses) >= 2 * len(job_ids))
        num_threads = threading.active_count()
        leases = registry.leases()
        for job_id in job_ids:
            leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [ok(0)])
        assert {job.status for job in await asyncio.gather(*waiting)} == {JobState.COMPLETED}
        return num_threads

    before = threading.active_count()
    assert loop(follow_all) <= before + 1


def test_without_a_worker_a_deadline_ends_what_is_waited_for(loop: Loop, registry: TestRegistry) -> None:
    waited, followed = (registry.submit([b'{"prompt": "a"}'], SubmitOptions(deadline_s=60)) for _ in range(2))
    for job_id in (waited, followed):
        registry.expire(job_id)

    async def look(client: AsyncBatchClient) -> list[Any]:
        records = [record async for record in client.results(followed, follow=True)]
        return [(await client.wait(waited, timeout_s=60)).status, *(record["error"]["code"] for record in records)]

    assert loop(look) == [JobState.EXPIRED, "batch_expired"]
