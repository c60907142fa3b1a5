from __future__ import annotations

import logging
import threading

import pytest

from tests.support.wait_until import wait_until
from worker.runtime.supervision import SupervisedThread


def _wait(stopping: threading.Event) -> None:
    stopping.wait()


def test_it_runs_until_it_is_told_to_stop() -> None:
    failures: list[BaseException] = []
    thread = SupervisedThread("looping", _wait, on_failure=failures.append)
    thread.start()
    assert thread.stop(5)
    assert failures == []


def test_one_that_does_not_stop_is_told_of() -> None:
    release = threading.Event()
    thread = SupervisedThread("stuck", lambda _stopping: _wait(release), on_failure=lambda _: None)
    thread.start()
    assert not thread.stop(0.05)
    release.set()
    assert thread.stop(5)


def test_what_it_raises_is_logged_and_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []
    error = ZeroDivisionError("a defect")

    def run(_stopping: threading.Event) -> None:
        raise error

    thread = SupervisedThread("broken", run, on_failure=failures.append)
    with caplog.at_level(logging.ERROR):
        thread.start()
        wait_until(lambda: failures)
    assert failures == [error]
    assert "the thread broken broke" in caplog.text
    assert "a defect" in caplog.text
    assert thread.stop(5)
