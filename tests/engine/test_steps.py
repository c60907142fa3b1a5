"""Steps until one fails."""

from __future__ import annotations

from typing import cast

import pytest

from engine.engine import Steps
from engine.errors import EngineFatal
from engine.outputs import FinishedRequests


class Finished:
    """What `Steps` sees of outputs on their way out: here ids."""

    def __init__(self) -> None:
        self.ready: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not self.ready

    def take(self) -> list[str]:
        ready, self.ready = self.ready, []
        return ready


class Harness:
    """Steps of which each may end requests, or fail."""

    def __init__(self) -> None:
        self.finished = Finished()
        self.steps = Steps(cast(FinishedRequests, self.finished))
        self.num_advances = 0

    def run(self, *ended: str, fails: bool = False) -> list[str]:
        def advance() -> None:
            self.num_advances += 1
            self.finished.ready += ended
            if fails:
                raise EngineFatal("the device is gone")

        return cast(list[str], self.steps.run(advance))


def test_each_step_hands_out_what_ended_in_it() -> None:
    harness = Harness()
    assert [harness.run("a", "b"), harness.run(), harness.run("c")] == [["a", "b"], [], ["c"]]
    assert not harness.steps.have_failed


def test_a_failure_is_raised_at_once_and_by_every_later_call_which_runs_nothing() -> None:
    harness = Harness()
    for _ in range(3):
        with pytest.raises(EngineFatal, match="the device is gone"):
            harness.run(fails=True)
    assert harness.num_advances == 1
    with pytest.raises(EngineFatal, match="the device is gone"):
        harness.steps.check()


def test_what_had_ended_is_handed_out_before_the_failure_is_raised() -> None:
    harness = Harness()
    assert harness.run("a", fails=True) == ["a"]
    assert harness.steps.have_failed
    with pytest.raises(EngineFatal, match="the device is gone"):
        harness.run("never")


def test_whoever_is_cancelled_after_a_failure_has_an_output_too() -> None:
    harness = Harness()
    assert harness.run("a", fails=True) == ["a"]
    harness.finished.ready.append("b")
    assert harness.run() == ["b"]
    with pytest.raises(EngineFatal, match="the device is gone"):
        harness.run()
