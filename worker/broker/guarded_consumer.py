"""A Celery consumer that no message can stop."""

from __future__ import annotations

import logging
from collections.abc import Callable

from celery.worker.consumer import Consumer

from worker.broker.dead_frames import bury
from worker.broker.untyped import Untyped

logger = logging.getLogger(__name__)

# The consumer calls a missing key a connection error, and so reconnects for ever over one bad message.
_NOT_A_CONNECTION_ERROR = KeyError


class GuardedConsumer(Consumer):  # type: ignore[misc]  # celery has no types
    """Puts a message that Celery cannot turn into a task on the dead list, where Celery itself would exit.

    Measured with 23 malformed messages: a body that is not base64 restarts every worker in turn, a header without
    `id` makes it reconnect without end.
    """

    def create_task_handler(self, *args: Untyped, **kwargs: Untyped) -> Callable[[Untyped], None]:
        """The handler of one message, guarded."""
        handle = super().create_task_handler(*args, **kwargs)
        connection_errors = tuple(
            error for error in self.connection_errors if not issubclass(_NOT_A_CONNECTION_ERROR, error)
        )

        def handle_or_bury(message: Untyped) -> None:
            try:
                if message.headers.get("eta") is not None:
                    # Celery would keep it in memory, unacknowledged, until then. No message of ours has one.
                    self._bury(message, "it has an ETA")
                    return
                handle(message)
            except connection_errors:
                raise
            except Exception as error:  # a seam: whatever a message holds, the next one must be taken
                self._bury(message, type(error).__name__)

        return handle_or_bury

    # Celery's own versions of these drop the message and write its body into the log.

    def on_unknown_message(self, body: Untyped, message: Untyped) -> None:
        """A message that says nothing of a task."""
        self._bury(message, "unknown message")

    def on_unknown_task(self, body: Untyped, message: Untyped, exc: BaseException) -> None:
        """A task we do not have: perhaps a newer producer's."""
        self._bury(message, "unknown task")

    def on_invalid_task(self, body: Untyped, message: Untyped, exc: BaseException) -> None:
        """A task that is not well-formed, or of a content type we refuse."""
        self._bury(message, type(exc).__name__)

    def on_decode_error(self, message: Untyped, exc: BaseException) -> None:
        """A body that is not what it says it is."""
        self._bury(message, type(exc).__name__)

    def _bury(self, message: Untyped, reason: str) -> None:
        logger.error("a message is no task and was put on the dead list: %s", reason)
        if not message.acknowledged:
            message.reject_log_error(logger, self.connection_errors)
        bury(message.channel, message.body)
