"""Keeps Celery's worker running whatever a message holds: its consumer, its threads, its requests and its events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from celery import Celery
from celery.apps.worker import Worker, install_worker_term_handler
from celery.concurrency.thread import TaskPool
from celery.events.dispatcher import EventDispatcher
from celery.worker.consumer import Consumer
from celery.worker.request import Request

from worker.broker.messages import bury
from worker.registry.exchange import Untyped

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


class GuardedPool(TaskPool):  # type: ignore[misc]  # celery has no types
    """Acknowledges a message over which Celery's own code failed, rather than our task.

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


class InterruptibleRequest(Request):  # type: ignore[misc]  # celery has no types
    """Makes SIGQUIT and revocation work on threads, which cannot be killed: the unit stops and is given back.

    Stock Celery raises NotImplementedError there. Named by the tasks' `Request`.
    """

    def terminate(self, pool: Untyped, signal: Untyped = None) -> None:
        """Revoked with `terminate`: give the unit back. The job goes on elsewhere; the registry cancels jobs."""
        self.task.runtime.interrupt(self.id)

    def cancel(self, pool: Untyped, signal: Untyped = None, emit_retry: bool = True) -> None:
        """Cold shutdown: give the unit back at once."""
        self.task.runtime.interrupt(self.id)


class QuietWorker(Worker):  # type: ignore[misc]  # celery has no types
    """Says nothing past the log when SIGTERM comes: our runtime logs that it stops.

    Celery writes `worker: Warm shutdown (MainProcess)` between two line ends right to the descriptor, which in a
    container is the one thing in its log that is no JSON. What it says on Ctrl-C is for a person at a terminal, and
    stays.
    """

    def install_platform_tweaks(self, worker: Untyped) -> None:
        """Signal handlers."""
        super().install_platform_tweaks(worker)
        install_worker_term_handler(worker, verbose=False)


class LossyDispatcher(EventDispatcher):  # type: ignore[misc]  # Celery has no types
    """Tries each event once. Celery's heartbeats would be tried until Redis answers, on the thread that also hears
    SIGTERM: a Redis that hangs would hold the worker until somebody kills it. What could not be sent is kept, and sent
    over the next connection.
    """

    def send(self, type: str, **options: object) -> None:
        """See EventDispatcher.send."""
        super().send(type, **{**options, "retry": False})


def send_first_event(app: Celery, hostname: str) -> None:
    """Send the event that this worker is online. Raises redis.RedisError if Redis refuses it.

    Celery itself keeps events that it cannot send, says nothing and tries again, so a Redis user that lacks PUBLISH (of
    an ACL file older than events) would go unnoticed.
    """
    with (
        app.connection_for_write() as connection,
        app.events.Dispatcher(connection, hostname=hostname, buffer_while_offline=False) as dispatcher,
    ):
        dispatcher.send("worker-online")
