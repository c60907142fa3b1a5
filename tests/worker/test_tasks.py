from __future__ import annotations

from typing import cast

import pytest
from celery.exceptions import Reject

from settings import Settings
from worker.app import create_app
from worker.broker.messages import MessageEnd
from worker.runtime.runtime import WorkerRuntime
from worker.tasks import register_tasks


class _Runtime:
    """Ends every message in the same way."""

    def __init__(self, end: MessageEnd) -> None:
        self._end = end

    def submit(self, *_: object) -> MessageEnd:
        return self._end

    def plan(self, *_: object) -> MessageEnd:
        return self._end

    def run_shard(self, *_: object) -> MessageEnd:
        return self._end


CALLS = [("millrace.submit", ("job", 1)), ("millrace.plan", ("job",)), ("millrace.run_shard", ("job", 0))]


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_a_message_goes_back_if_the_runtime_says_so(name: str, arguments: tuple[object, ...]) -> None:
    app = create_app(Settings())
    register_tasks(app, cast(WorkerRuntime, _Runtime(MessageEnd.REQUEUE)))
    with pytest.raises(Reject) as caught:
        app.tasks[name](*arguments)
    assert caught.value.requeue


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_a_message_that_is_done_is_acknowledged(name: str, arguments: tuple[object, ...]) -> None:
    app = create_app(Settings())
    register_tasks(app, cast(WorkerRuntime, _Runtime(MessageEnd.DONE)))
    assert app.tasks[name](*arguments) is None
