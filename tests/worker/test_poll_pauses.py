from __future__ import annotations

import time

import pytest

from worker.client import FIRST_POLL_S, LONGEST_POLL_S, PollPauses


def test_pauses_double_to_the_longest_and_start_again_with_news() -> None:
    pauses = PollPauses()
    found = [pauses.next_s() for _ in range(8)]
    assert found[:3] == [FIRST_POLL_S, 2 * FIRST_POLL_S, 4 * FIRST_POLL_S]
    assert found[-1] == LONGEST_POLL_S
    pauses.restart()
    assert pauses.next_s() == FIRST_POLL_S


def test_no_pause_is_longer_than_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    pauses = PollPauses(timeout_s=0.05)
    assert pauses.next_s() == FIRST_POLL_S
    now_s = 100.04
    assert pauses.next_s() == pytest.approx(0.01)
    now_s = 101.0
    assert pauses.next_s() == 0.0
