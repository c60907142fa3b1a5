from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.support.wait_until import wait_until
from worker.runtime.quarantine import Quarantine


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

    def ask(self, enter: Callable[[float], bool], timeout_s: float = 5) -> threading.Thread:
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
    assert visitors.sent_away.wait(5)
    assert not gate.enter(0.05)
    assert visitors.answers == []
    gate.leave()
    suspect.join(5)
    assert visitors.answers == [True]
    assert not gate.enter(0.05)
    gate.leave_alone()
    assert gate.enter(0)


def test_a_suspect_waits_until_the_engine_has_let_go_of_what_was_sent_away() -> None:
    visitors = Visitors()
    visitors.engine_is_empty = False  # in a step for a unit that is gone
    suspect = visitors.ask(visitors.gate.enter_alone)
    suspect.join(0.2)
    assert visitors.answers == []
    visitors.engine_is_empty = True
    suspect.join(5)
    assert visitors.answers == [True]


def test_company_that_ends_by_itself_in_time_is_not_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.quarantine.COMPANY_WAIT_S", 5)
    visitors = Visitors()
    assert visitors.gate.enter(0)
    suspect = visitors.ask(visitors.gate.enter_alone)
    wait_until(lambda: not visitors.gate.enter(0))
    visitors.gate.leave()
    suspect.join(5)
    assert visitors.answers == [True]
    assert not visitors.sent_away.is_set()


def test_a_waiting_suspect_goes_before_ordinary_units() -> None:
    visitors = Visitors()
    gate = visitors.gate
    assert gate.enter_alone(0)
    second = visitors.ask(gate.enter_alone)
    wait_until(lambda: not gate.enter_alone(0))
    ordinary = visitors.ask(gate.enter)
    gate.leave_alone()
    second.join(5)
    assert visitors.answers == [True]
    assert ordinary.is_alive()
    gate.leave_alone()
    ordinary.join(5)
    assert visitors.answers == [True, True]


def test_one_suspect_waits_at_a_time_and_not_for_ever() -> None:
    visitors = Visitors()
    gate = visitors.gate
    assert gate.enter_alone(0)
    waiting = visitors.ask(gate.enter_alone, timeout_s=0.2)
    wait_until(lambda: gate._is_wanted)
    assert not gate.enter_alone(5)  # at once
    waiting.join(5)
    assert visitors.answers == [False]
    assert not gate.enter(0.05)  # the first still runs
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
        thread.join(5)
    assert sorted(visitors.answers) == [False, True]


def test_closing_ends_every_wait() -> None:
    visitors = Visitors()
    gate = visitors.gate
    assert gate.enter(0)
    threads = [visitors.ask(gate.enter_alone)]
    wait_until(lambda: gate._is_wanted)
    threads.append(visitors.ask(gate.enter))
    gate.close()
    for thread in threads:
        thread.join(2)
    assert visitors.answers == [False, False]
    gate.leave()
    assert not gate.enter(0)
    assert not gate.enter_alone(0)
