from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from kombu.asynchronous import Hub

from tests.support.wait_until import wait_until
from worker.celery_worker import worker_step
from worker.runtime.runtime import WorkerRuntime


class Runtime:
    """What a step calls."""

    def __init__(self) -> None:
        self.has_started = False
        self.answers: list[object] = []

    def start(self) -> None:
        self.has_started = True

    def tick(self, num_answers: object) -> None:
        self.answers.append(num_answers)


def test_celerys_event_loop_gives_a_sign_of_life_while_it_turns() -> None:
    runtime = Runtime()
    hub = Hub()
    channel = SimpleNamespace(num_answers=3)
    consumer = SimpleNamespace(task_consumer=SimpleNamespace(channel=channel))
    parent = SimpleNamespace(hub=hub, steps=[], consumer=consumer)
    worker_step(cast(WorkerRuntime, runtime))(parent).start(parent)
    assert runtime.has_started
    loop = hub.create_loop()
    wait_until(lambda: next(loop) or runtime.answers)
    consumer.task_consumer = None  # while it connects anew
    wait_until(lambda: next(loop) or len(runtime.answers) > 1)
    hub.close()
    assert runtime.answers == [(id(channel), 3), None]


def test_a_celery_without_an_event_loop_starts_as_well() -> None:
    runtime = Runtime()
    parent = SimpleNamespace(hub=None, steps=[])
    worker_step(cast(WorkerRuntime, runtime))(parent).start(parent)
    assert runtime.has_started
