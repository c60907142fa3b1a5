"""Celery's pool of threads, of which no message can take a slot for ever."""

from __future__ import annotations

import logging
from concurrent.futures import Future

from celery.concurrency.thread import TaskPool

from worker.broker.untyped import Untyped

logger = logging.getLogger(__name__)


class GuardedPool(TaskPool):  # type: ignore[misc]  # celery has no types
    """Acknowledges a message over which Celery's own code around the task failed, and not the task.

    Celery's pool forgets such a failure, and the message with it: it stays unacknowledged and counts as one that is
    worked on. A handful of them (a body whose third part is a number), and the worker takes nothing more.
    """

    def on_apply(self, target: Untyped, args: Untyped = None, kwargs: Untyped = None, **options: Untyped) -> Untyped:
        """Run a task on a thread. `callback` is a method of the task's request."""
        result = super().on_apply(target, args, kwargs, **options)
        request = options["callback"].__self__
        result.f.add_done_callback(lambda future: _conclude(future, request))
        return result


def _conclude(future: Future[Untyped], request: Untyped) -> None:
    if future.cancelled():  # the worker ends, and its messages go back
        return
    error = future.exception()
    if error is not None:
        logger.error("a message broke what is around its task and was dropped: %s", type(error).__name__)
        request.acknowledge()
