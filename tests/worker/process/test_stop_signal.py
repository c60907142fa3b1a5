from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.wait_until import wait_until
from worker.runtime.supervision import StopSignal


class Clock:
    """Stands still until it is told otherwise."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("worker.runtime.supervision.time", clock)
    return clock


def test_before_its_thread_first_asks_nothing_is_overdue(clock: Clock) -> None:
    signal = StopSignal()
    clock.now_s += 1000
    assert signal.overdue_s == 0


def test_work_between_two_looks_is_overdue_time(clock: Clock) -> None:
    signal = StopSignal()
    assert not signal.is_set()
    clock.now_s += 7
    assert signal.overdue_s == 7
    assert not signal.wait(0)
    assert signal.overdue_s == 0


def test_a_wait_may_last_as_long_as_it_says(clock: Clock) -> None:
    signal = StopSignal()
    signal.is_set()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(signal.wait, 60)
        clock.now_s += 1
        wait_until(lambda: signal.overdue_s == 0)  # it waits
        clock.now_s += 60
        assert signal.overdue_s <= 1  # 0 if it began to wait before the clock went on
        clock.now_s += 5
        assert 5 <= signal.overdue_s <= 6
        signal.set()
        assert waiting.result(5)
    assert signal.overdue_s == 0
