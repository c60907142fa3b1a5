"""Remote control that says nothing."""

from __future__ import annotations

from celery.app.control import Control

from worker.broker.untyped import Untyped


class SilentControl(Control):  # type: ignore[misc]  # celery has no types
    """For Flower, which asks workers who they are and tells them to send events.

    Ours do not listen (`worker_enable_remote_control`), and the Redis user of Flower may not speak.
    """

    def broadcast(self, command: str, *args: Untyped, **kwargs: Untyped) -> None:
        """Nobody is told, so nobody answers."""
