"""Events of a worker, for which nothing waits."""

from __future__ import annotations

from celery.events.dispatcher import EventDispatcher


class LossyDispatcher(EventDispatcher):  # type: ignore[misc]  # Celery has no types
    """Tries each event once. Celery's heartbeats would be tried until Redis answers, on the thread that also hears
    SIGTERM: a Redis that hangs would hold the worker until somebody kills it. What could not be sent is kept, and sent
    over the next connection.
    """

    def send(self, type: str, **options: object) -> None:
        """See EventDispatcher.send."""
        super().send(type, **{**options, "retry": False})
