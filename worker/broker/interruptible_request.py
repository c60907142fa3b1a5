"""Celery's view of a running task, for an engine instead of a process."""

from __future__ import annotations

from celery.worker.request import Request

from worker.broker.untyped import Untyped


class InterruptibleRequest(Request):  # type: ignore[misc]  # celery has no types
    """Makes SIGQUIT and revocation work on threads, which cannot be killed: the unit stops and is given back.

    Stock Celery raises NotImplementedError there. Named by the tasks' `Request`.
    """

    def terminate(self, pool: Untyped, signal: Untyped = None) -> None:
        """Revoked with `terminate`: give the unit back. The job goes on elsewhere; cancelling is the registry's."""
        self.task.runtime.interrupt(self.id)

    def cancel(self, pool: Untyped, signal: Untyped = None, emit_retry: bool = True) -> None:
        """Cold shutdown: give the unit back at once."""
        self.task.runtime.interrupt(self.id)
