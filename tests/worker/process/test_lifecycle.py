from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from kombu.asynchronous import Hub

from tests.support.wait_until import wait_until
from worker.process.lifecycle import worker_step
from worker.process.worker_runtime import WorkerRuntime


class Runtime:
    """What a step calls."""

    def __init__(self) -> None:
        self.has_started = False
        self.num_ticks = 0

    def start(self) -> None:
        self.has_started = True

    def tick(self) -> None:
        self.num_ticks += 1


def test_celerys_event_loop_gives_a_sign_of_life_while_it_turns() -> None:
    runtime = Runtime()
    hub = Hub()
    parent = SimpleNamespace(hub=hub, steps=[])
    worker_step(cast(WorkerRuntime, runtime))(parent).start(parent)
    assert runtime.has_started
    loop = hub.create_loop()
    wait_until(lambda: next(loop) or runtime.num_ticks > 0)
    hub.close()


def test_a_celery_without_an_event_loop_starts_as_well() -> None:
    runtime = Runtime()
    parent = SimpleNamespace(hub=None, steps=[])
    worker_step(cast(WorkerRuntime, runtime))(parent).start(parent)
    assert runtime.has_started
