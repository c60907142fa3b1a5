from __future__ import annotations

from contextlib import ExitStack

import pytest

from worker.runtime.supervision import Activity


def test_a_worker_is_full_while_every_thread_has_a_task() -> None:
    activity = Activity(num_threads=2)
    found = []
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(activity.task())
            found.append(activity.is_full)
    assert [*found, activity.is_full] == [False, True, False]
    assert activity.num_received == 2


def test_a_task_that_fails_frees_its_thread() -> None:
    activity = Activity(num_threads=1)
    with pytest.raises(ZeroDivisionError), activity.task():
        raise ZeroDivisionError
    assert not activity.is_full
