"""Suspects in one worker run alone, one after the other, and never deadlock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.processes import is_waiting, wait_until
from tests.support.registry import TestRegistry, Units, must_claim, ok, running_units
from worker.broker.messages import MessageEnd
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import StopReason
from worker.runtime.held_units import HeldUnit
from worker.runtime.quarantine import Quarantine
from worker.schemas import JobState


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.quarantine.COMPANY_WAIT_S", 0.05)
    monkeypatch.setattr("worker.runtime.quarantine.SEND_AWAY_INTERVAL_S", 0.01)


class Visitors:
    """Threads at one gate, and what each was told."""

    def __init__(self) -> None:
        self.sent_away = threading.Event()
        self.engine_is_empty = True
        self.gate = Quarantine(self.sent_away.set, lambda: self.engine_is_empty)
        self.answers: list[bool] = []

    def ask(self, enter: Callable[[float], bool], timeout_s: float = 60) -> threading.Thread:
        thread = threading.Thread(target=lambda: self.answers.append(enter(timeout_s)))
        thread.start()
        return thread


def test_ordinary_units_share_the_worker() -> None:
    gate = Visitors().gate
    assert gate.enter(0)
    assert gate.enter(0)


def test_a_suspect_waits_for_company_sends_it_away_and_lets_nobody_in() -> None:
    visitors = Visitors()
    gate = visitors.gate
    assert gate.enter(0)
    suspect = visitors.ask(gate.enter_alone)
    assert visitors.sent_away.wait(20)
    assert not gate.enter(0.05)
    assert visitors.answers == []
    gate.leave()
    suspect.join(20)
    assert visitors.answers == [True]
    assert not gate.enter(0.05)
    gate.leave_alone()
    assert gate.enter(0)


def test_a_suspect_waits_until_the_engine_has_let_go_of_what_was_sent_away() -> None:
    visitors = Visitors()
    visitors.engine_is_empty = False  # in a step for a unit that is gone
    suspect = visitors.ask(visitors.gate.enter_alone)
    assert visitors.sent_away.wait(20)  # its patience is over, and it waits on
    wait_until(lambda: is_waiting(suspect))
    assert visitors.answers == []
    visitors.engine_is_empty = True
    suspect.join(20)
    assert visitors.answers == [True]


def test_company_that_ends_by_itself_in_time_is_not_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.quarantine.COMPANY_WAIT_S", 60)
    visitors = Visitors()
    assert visitors.gate.enter(0)
    suspect = visitors.ask(visitors.gate.enter_alone)
    wait_until(lambda: is_waiting(suspect))
    assert not visitors.gate.enter(0)
    visitors.gate.leave()
    suspect.join(20)
    assert visitors.answers == [True]
    assert not visitors.sent_away.is_set()


def test_a_waiting_suspect_goes_before_ordinary_units() -> None:
    visitors = Visitors()
    gate = visitors.gate
    assert gate.enter_alone(0)
    second = visitors.ask(gate.enter_alone)
    wait_until(lambda: is_waiting(second))
    assert not gate.enter_alone(0)
    ordinary = visitors.ask(gate.enter)
    wait_until(lambda: is_waiting(ordinary))
    gate.leave_alone()
    second.join(20)
    assert visitors.answers == [True]
    assert ordinary.is_alive()
    gate.leave_alone()
    ordinary.join(20)
    assert visitors.answers == [True, True]


def test_one_suspect_waits_at_a_time_and_not_for_ever() -> None:
    visitors = Visitors()
    gate = visitors.gate
    assert gate.enter_alone(0)
    assert not gate.enter_alone(0.05)
    assert not gate.enter(0.05)  # the first still runs
    waiting = visitors.ask(gate.enter_alone)
    wait_until(lambda: is_waiting(waiting))
    assert not gate.enter_alone(600)  # at once: that is longer than a test may take
    gate.leave_alone()
    waiting.join(20)
    assert visitors.answers == [True]
    gate.leave_alone()
    assert gate.enter(0)


def test_two_suspects_at_the_same_moment_run_one_after_the_other() -> None:
    visitors = Visitors()
    gate = visitors.gate
    assert gate.enter(0)
    both = [visitors.ask(gate.enter_alone) for _ in range(2)]
    wait_until(lambda: visitors.answers == [False])
    gate.leave()
    for thread in both:
        thread.join(20)
    assert sorted(visitors.answers) == [False, True]


def test_closing_ends_every_wait() -> None:
    visitors = Visitors()
    gate = visitors.gate
    assert gate.enter(0)
    threads = [visitors.ask(gate.enter_alone)]
    wait_until(lambda: is_waiting(threads[0]))
    threads.append(visitors.ask(gate.enter))
    gate.close()
    for thread in threads:
        thread.join(20)
    assert visitors.answers == [False, False]
    gate.leave()
    assert not gate.enter(0)
    assert not gate.enter_alone(0)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.quarantine.COMPANY_WAIT_S", 0.1)
    monkeypatch.setattr("worker.runtime.quarantine.SEND_AWAY_INTERVAL_S", 0.01)
    monkeypatch.setattr("worker.runtime.unit_runner.SLOT_WAIT_S", 0.05)


class Worker:
    """A unit runner, its pool of threads, and a log of which units ran beside which."""

    def __init__(self, units: Units) -> None:
        self.units = units
        self.runner = units.runner()
        self.pool = ThreadPoolExecutor(6)
        self.company: dict[str, set[str]] = {}  # by unit: all that ran beside it at some time
        self.attempts: dict[str, list[int]] = {}  # by unit: what each of its claims counted
        self._running: set[str] = set()
        self._lock = threading.Lock()

    def message(self, ref: UnitRef, *, lasts_s: float = 0.0) -> Future[MessageEnd]:
        """Run a unit that takes `lasts_s` seconds, unless it is stopped."""
        return self.pool.submit(self.runner.run, ref, f"m{ref}", lambda held: self._work(held, lasts_s))

    def _work(self, held: HeldUnit, lasts_s: float) -> None:
        unit = held.claim.ref.unit
        with self._lock:
            self.attempts.setdefault(unit, []).append(held.claim.attempts)
            self._running.add(unit)
            for one in self._running:
                self.company.setdefault(one, set()).update(self._running - {one})
                self.company.setdefault(unit, set())
        until_s = time.monotonic() + lasts_s
        while time.monotonic() < until_s and held.stop_reason is None:
            time.sleep(0.005)
        with self._lock:
            self._running.discard(unit)
        if held.stop_reason is None:
            self.units.leases.put(held.claim, [ok(index) for index in held.claim.missing])
            held.set_written()


@pytest.fixture
def worker(registry: TestRegistry) -> Iterator[Worker]:
    with running_units(registry) as units:
        worker = Worker(units)
        yield worker
        worker.runner.drain()
        units.held_units.stop_all(StopReason.RELEASED)
        worker.pool.shutdown()


def _job(worker: Worker, num_shards: int, *, suspects: tuple[int, ...]) -> list[UnitRef]:
    registry = worker.units.registry
    job_id = registry.running_job(*[[number] for number in range(num_shards)])
    shards = [UnitRef.shard(job_id, number) for number in range(num_shards)]
    for number in suspects:
        worker.units.leases.release(must_claim(worker.units.leases, shards[number]), count_attempt=True)
    return shards


def test_a_suspect_sends_long_runners_back_and_runs_alone(worker: Worker, registry: TestRegistry) -> None:
    long, suspect = _job(worker, 2, suspects=(1,))
    running = worker.message(long, lasts_s=30)
    wait_until(lambda: "0" in worker.company)
    assert worker.message(suspect, lasts_s=0.05).result(20) is MessageEnd.DONE
    assert running.result(20) is MessageEnd.REQUEUE
    assert worker.message(long).result(20) is MessageEnd.DONE  # the suspect's thread may have gone on with it
    assert worker.company == {"0": set(), "1": set()}
    assert worker.attempts == {"0": [0, 0], "1": [1]}
    assert registry.status(long.job_id).status is JobState.COMPLETED


def test_suspects_that_come_together_run_one_after_the_other(worker: Worker, registry: TestRegistry) -> None:
    shards = _job(worker, 4, suspects=(0, 1, 2, 3))
    todo = set(shards)
    while todo:  # as the broker does with a message that goes back
        ends = {shard: worker.message(shard, lasts_s=0.05) for shard in todo}
        todo = {shard for shard, end in ends.items() if end.result(10) is MessageEnd.REQUEUE}
    assert worker.company == {"0": set(), "1": set(), "2": set(), "3": set()}
    assert registry.status(shards[0].job_id).status is JobState.COMPLETED


def test_nothing_is_claimed_beside_a_suspect_but_a_new_jobs_plan(worker: Worker, registry: TestRegistry) -> None:
    ordinary, suspect = _job(worker, 2, suspects=(1,))
    running = worker.message(suspect, lasts_s=30)
    wait_until(lambda: "1" in worker.company)
    assert worker.message(ordinary).result(20) is MessageEnd.REQUEUE
    assert registry.redis.hget(registry.keys.unit(ordinary), "fence") == b"0"
    plan = UnitRef.plan(registry.submit([b"x"]))
    assert worker.message(plan).result(20) is MessageEnd.DONE
    assert not running.done()


def test_a_suspected_plan_runs_alone(worker: Worker, registry: TestRegistry) -> None:
    [long] = _job(worker, 1, suspects=())
    plan = UnitRef.plan(registry.submit([b"x"]))
    worker.units.leases.release(must_claim(worker.units.leases, plan), count_attempt=True)
    running = worker.message(long, lasts_s=30)
    wait_until(lambda: "0" in worker.company)
    assert worker.message(plan).result(20) is MessageEnd.DONE
    assert running.result(20) is MessageEnd.REQUEUE
    assert worker.company["plan"] == set()


def test_draining_ends_a_suspects_wait(worker: Worker) -> None:
    first, second = _job(worker, 2, suspects=(0, 1))
    worker.message(first, lasts_s=30)
    wait_until(lambda: "0" in worker.company)
    waiting = worker.message(second)
    wait_until(lambda: worker.runner._quarantine._is_wanted)
    worker.runner.drain()
    assert waiting.result(20) is MessageEnd.REQUEUE


def test_a_guilty_shards_message_is_done_once_it_is_split(worker: Worker, registry: TestRegistry) -> None:
    job_id = registry.running_job([0, 1])
    shard = UnitRef.shard(job_id, 0)
    claim = must_claim(worker.units.leases, shard, alone=True)
    worker.units.leases.begin_alone(claim)
    worker.units.leases.release(claim, count_attempt=True)
    assert worker.message(shard).result(20) is MessageEnd.DONE
    assert worker.company == {}
    assert registry.status(job_id).shards_total == 3
