"""Ten readers of one job while Redis goes back again and again: what each was given, against what the job has."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import redis

from tests.chaos.faults import FileHistory
from tests.support.processes import running_thread, wait_until
from tests.support.redis_servers import RestartableRedis
from tests.support.registry import TestRegistry, ok
from worker.async_client import AsyncBatchClient
from worker.client import BatchClient
from worker.registry import jobs as job_queries
from worker.registry.errors import ResultsRewound
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim
from worker.registry.lifecycle import PutStatus

NUM_LINES = 400
SHARDS = (range(150), range(150, 300), range(300, NUM_LINES))
MAX_BATCH = 6  # records of one write
PAGE_RECORDS = 25
END_TIMEOUT_S = 120.0


@dataclass
class History:
    """What one reader was given, and told."""

    name: str
    given: list[int] = field(default_factory=list)  # lines of the records, since it was last told to read all again
    num_told: int = 0  # that its cursor is not good any more
    num_rewinds: int = 0  # that readings found by themselves
    num_cursors: int = 0  # that it went on from
    end: str = "open"

    def begin_again(self) -> None:
        self.given.clear()
        self.num_told += 1

    def problem(self) -> str | None:
        """What is wrong with it, if it ended normally."""
        if self.end != "ended":
            return f"{self.name}: {self.end}"
        missing = set(range(NUM_LINES)) - set(self.given)
        num_twice = len(self.given) - len(set(self.given))
        return f"{self.name}: {len(missing)} missing, {num_twice} twice" if missing or num_twice else None


@dataclass(frozen=True)
class Reader:
    """Reads a job in one order to its end; with `take`, in several readings of so many records, by their cursors."""

    url: str
    job_id: str
    order: Any
    take: int  # 0: all in one reading
    rng: random.Random
    stopping: threading.Event  # once Redis is gone for good

    def read(self, history: History) -> None:
        cursor = "0"
        with BatchClient(self.url) as client:
            while cursor:
                results = client.results(self.job_id, cursor, follow=True, order=self.order)
                try:
                    is_end = self._take(results, history)
                except ResultsRewound:
                    history.begin_again()
                    cursor = "0"
                    continue
                history.num_rewinds += results.num_rewinds
                cursor = "" if is_end else results.cursor
                history.num_cursors += not is_end
        history.end = "ended"

    def _take(self, results: Iterator[dict[str, Any]], history: History) -> bool:
        num_taken = 0
        while not self.take or num_taken < self.take:
            try:
                record = next(results, None)
            except redis.RedisError:
                if self.stopping.is_set():
                    raise
                continue  # the same reading goes on
            if record is None:
                return True
            history.given.append(record["i"])
            num_taken += 1
            if self.rng.random() < 0.02:
                time.sleep(0.01)
        return False

    async def read_in_loop(self, history: History) -> None:
        cursor = "0"
        async with AsyncBatchClient(self.url) as client:
            while cursor:
                results = client.results(self.job_id, cursor, follow=True, order=self.order)
                try:
                    is_end = await self._take_in_loop(results, history)
                except ResultsRewound:
                    history.begin_again()
                    cursor = "0"
                    continue
                history.num_rewinds += results.num_rewinds
                cursor = "" if is_end else results.cursor
                history.num_cursors += not is_end
        history.end = "ended"

    async def _take_in_loop(self, results: Any, history: History) -> bool:
        num_taken = 0
        while not self.take or num_taken < self.take:
            try:
                record = await anext(results, None)
            except redis.RedisError:
                if self.stopping.is_set():
                    raise
                await asyncio.sleep(0.01)
                continue
            if record is None:
                return True
            history.given.append(record["i"])
            num_taken += 1
            if self.rng.random() < 0.02:
                await asyncio.sleep(0.01)
        return False


class Writer:
    """Writes a job's records in an order by chance, and what Redis has lost once more."""

    def __init__(self, registry: TestRegistry, job_id: str, rng: random.Random) -> None:
        self._leases = registry.leases(lease_s=0.5)
        self._reaper = registry.reap_queue(grace_s=0.1, patience_s=0.2)
        self._job_id = job_id
        self._rng = rng
        self._claims: dict[UnitRef, Claim] = {}
        self._missing: dict[UnitRef, list[int]] = {}
        self.num_written = 0  # at all, also what was lost later

    @property
    def num_left(self) -> int:
        """Records that it still has to write, as far as it knows."""
        missing = list(self._missing.values())
        return sum(map(len, missing)) if len(missing) == len(SHARDS) else NUM_LINES

    def run(self, stop: threading.Event) -> None:
        """Write until told to stop: a job that has ended may run again."""
        while not stop.is_set():
            for number in range(len(SHARDS)):
                with suppress(redis.RedisError):
                    self._write(UnitRef.shard(self._job_id, number))

    def _write(self, shard: UnitRef) -> None:
        if shard not in self._claims:
            claim = self._leases.claim(shard, alone=True)  # a lease that ran out makes it a suspect
            if not isinstance(claim, Claim):
                # Its lease is of a time that Redis has forgotten: it runs out, and a reaper says who is gone.
                self._reaper.due()
                time.sleep(0.01)
                return
            self._claims[shard], missing = claim, list(claim.missing)
            self._rng.shuffle(missing)
            self._missing[shard] = missing
        batch = self._missing[shard][: self._rng.randint(1, MAX_BATCH)]
        records = [ok(index, json.dumps({"i": index})) for index in batch]
        status, _ = self._leases.put(self._claims[shard], records)
        self.num_written += len(batch)
        del self._missing[shard][: len(batch)]
        if status is not PutStatus.OPEN:
            del self._claims[shard]
        time.sleep(0.001)


def _go_back_often(server: RestartableRedis, writer: Writer, rng: random.Random, count: int) -> int:
    """Let Redis forget between 5 and 120 records, `count` times; how many were forgotten."""
    num_lost, past = 0, FileHistory(server)
    for _ in range(count):
        _wait_written(writer, rng.randint(10, 60))
        file_bytes, written = past.num_whole_bytes, writer.num_written
        _wait_written(writer, rng.randint(5, 120))
        num_lost += writer.num_written - written
        past.cut_to(file_bytes)
    return num_lost


def _wait_written(writer: Writer, count: int) -> None:
    """Wait for so many records more, or until only a few are left."""
    until = writer.num_written + count
    wait_until(
        lambda: writer.num_written >= until or writer.num_left <= MAX_BATCH * len(SHARDS), timeout_s=END_TIMEOUT_S
    )


def _readers(url: str, job_id: str, seed: int, stopping: threading.Event) -> list[Reader]:
    """Both orders; one reading, few and many."""
    kinds = [("completion", 0), ("completion", 37), ("completion", 150), ("input", 0), ("input", 60)]
    return [
        Reader(url, job_id, order, take, random.Random(seed + number), stopping)
        for number, (order, take) in enumerate(kinds)
    ]


async def _read_all(readers: list[Reader], histories: list[History]) -> None:
    await asyncio.gather(*(reader.read_in_loop(history) for reader, history in zip(readers, histories, strict=True)))


def _guarded(act: Callable[[], None], histories: list[History]) -> None:
    """Note an error with those whom it ended."""
    try:
        act()
    except Exception as error:
        for history in histories:
            history.end = history.end if history.end == "ended" else repr(error)


def run_round(server: RestartableRedis, seed: int) -> list[History]:
    """One job of which Redis forgets a part three times, and what ten readers were given of it."""
    rng = random.Random(seed)
    registry = TestRegistry.at(server.url)
    job_id = registry.running_job(*SHARDS)
    writer = Writer(registry, job_id, rng)
    stopping = threading.Event()
    readers = _readers(server.url, job_id, 100 * seed, stopping)
    histories = [History(f"{where} {r.order} {r.take}") for where in ("thread", "loop") for r in readers]
    threads = [
        threading.Thread(target=_guarded, args=(partial(r.read, h), [h]))
        for r, h in zip(readers, histories[:5], strict=True)
    ]
    in_loop = partial(asyncio.run, _read_all(readers, histories[5:]))
    threads.append(threading.Thread(target=_guarded, args=(in_loop, histories[5:])))
    for thread in threads:
        thread.start()
    with ExitStack() as stack:
        stack.callback(stopping.set)
        stack.enter_context(running_thread(writer.run))
        num_lost = _go_back_often(server, writer, rng, count=3)
        wait_until(lambda: not any(thread.is_alive() for thread in threads), timeout_s=END_TIMEOUT_S)
        # Redis may have gone back once more after the readers' end: the writer's job ends again.
        records = registry.keys.records(job_id)
        wait_until(lambda: registry.redis.hlen(records) == NUM_LINES, timeout_s=END_TIMEOUT_S)
    _check(registry, job_id, histories)
    assert num_lost > 0
    registry.redis.close()
    return histories


def _check(registry: TestRegistry, job_id: str, histories: list[History]) -> None:
    has = {int(index) for index in cast("list[bytes]", registry.redis.hkeys(registry.keys.records(job_id)))}
    assert has == set(range(NUM_LINES))
    problems = [problem for history in histories if (problem := history.problem()) is not None]
    assert not problems, problems
    in_order = [history for history in histories if " input " in history.name]
    assert all(history.given == list(range(NUM_LINES)) and history.num_told == 0 for history in in_order)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch, short_pauses: None) -> None:
    monkeypatch.setattr(job_queries, "PAGE_RECORDS", PAGE_RECORDS)


@pytest.mark.parametrize("num_rounds", [2, pytest.param(50, marks=pytest.mark.chaos)])
def test_no_reader_misses_a_record_or_gets_one_twice_untold(durable_redis: RestartableRedis, num_rounds: int) -> None:
    histories = [history for seed in range(num_rounds) for history in run_round(durable_redis, seed)]
    rewinds, told = sum(h.num_rewinds for h in histories), sum(h.num_told for h in histories)
    print(
        f"{num_rounds} rounds, {len(histories)} readers: {rewinds} rewinds were found by readings, {told} times a "
        f"cursor was refused, {sum(h.num_cursors for h in histories)} cursors were gone on from"
    )
    assert rewinds > 0
