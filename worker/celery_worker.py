"""Runs the Celery worker behind `millrace worker`, with the engine's threads started and stopped along with it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery import bootsteps, signals
from celery.app import trace
from celery.exceptions import CPendingDeprecationWarning, Reject
from celery.platforms import SecurityWarning
from celery.worker import state, strategy
from celery.worker.consumer import consumer

from settings import EffectiveSettings
from worker.app import create_app
from worker.broker.celery_guards import QuietWorker, send_first_event
from worker.registry.exchange import Untyped
from worker.requests.step_engine import StepEngine, spare_collections
from worker.runtime.build import WorkerParts, announced_names
from worker.runtime.runtime import WorkerRuntime
from worker.runtime.supervision import TICK_INTERVAL_S
from worker.runtime.unit_runner import UnitFailed
from worker.tasks import register_tasks

logger = logging.getLogger(__name__)


def run_worker(effective: EffectiveSettings, load_engine: Callable[[EffectiveSettings], StepEngine]) -> int:
    """Run a worker on this process's main thread until a signal, or an engine that broke or hung, ends it.

    Returns the exit code: 0 after SIGTERM, once running prompts finished or were given back, and after SIGQUIT, which
    gives them back at once; 1 after SIGINT, otherwise as SIGTERM; 70 (EX_SOFTWARE) if the engine or a thread around it
    broke or hung, for a supervisor to start another.
    Raises redis.RedisError if Redis cannot be had, and what `load_engine` raises: both before any work is taken.
    """
    settings = effective.settings
    app = create_app(settings, announced_names(settings).names)
    app.events.dispatcher_cls = "worker.broker.celery_guards:LossyDispatcher"
    parts = WorkerParts(app, settings, lambda: load_engine(effective), on_failure=_ask_celery_to_stop)
    runtime = WorkerRuntime(parts)
    runtime.load()
    spare_collections()
    register_tasks(app, runtime)
    app.steps["worker"].add(worker_step(runtime))
    hostname = f"millrace@{runtime.worker_id}"
    if settings.worker.send_events:
        send_first_event(app, hostname)
    with _our_own_logging():
        worker = QuietWorker(
            app=app,
            hostname=hostname,
            loglevel=settings.log.level.upper(),
            # Workers need to know nothing of each other: Redis has it all.
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=not settings.worker.send_events,
            quiet=True,  # no banner: stdout is for data
        )
        worker.start()
    if runtime.has_failed:
        # Not through the interpreter's end, which frees tensors and graphs: on a device that hangs that never returns.
        logging.shutdown()
        os._exit(os.EX_SOFTWARE)
    return int(worker.exitcode or 0)


def _ask_celery_to_stop() -> None:
    # As a signal handler of Celery's would: its loop looks at this on every turn.
    state.should_stop = os.EX_SOFTWARE


@contextmanager
def _our_own_logging() -> Iterator[None]:
    """Celery sets logging up unless somebody listens to this signal."""

    def leave_it_alone(**_: Untyped) -> None:
        return

    signals.setup_logging.connect(leave_it_alone, weak=False)
    # For root: about pickle, which is refused here, and about --uid, which is no option of ours.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    # At each lost connection: six lines about a setting that `create_app` sets.
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    filtered = [logging.getLogger(module.__name__) for module in (trace, strategy, consumer)]
    log_filter = CeleryLogFilter()
    for tasks_logger in filtered:
        tasks_logger.addFilter(log_filter)
    try:
        yield
    finally:
        for tasks_logger in filtered:
            tasks_logger.removeFilter(log_filter)
        signals.setup_logging.disconnect(leave_it_alone)


def worker_step(runtime: WorkerRuntime) -> type[bootsteps.StartStopStep]:
    """The step to add to `app.steps["worker"]`.

    Start: the engine is loaded before there is a Celery worker; then Celery's Pool, then this step (writer, lease
    keeper, reaper), then Celery's Consumer: no message is taken before everything that serves it runs.
    Stop, in reverse: the Consumer takes no more; this step lets running shards finish for `worker.drain_timeout_s`,
    gives the rest back, and stops its threads and the engine; then the Pool, whose threads are all free by then.
    """

    class RuntimeStep(bootsteps.StartStopStep):  # type: ignore[misc]  # celery has no types
        requires = ("celery.worker.components:Pool",)

        def start(self, parent: Untyped) -> None:
            runtime.start()
            if parent.hub is not None:  # Celery has none on Windows
                # Before the Consumer's own timers, so that it does not go with them when a connection is lost.
                parent.hub.call_repeatedly(TICK_INTERVAL_S, lambda: runtime.tick(_num_answers(parent)))

        def stop(self, parent: Untyped) -> None:
            runtime.stop(runtime.drain_timeout_s)

        def terminate(self, parent: Untyped) -> None:
            # SIGQUIT: everything goes back at once.
            runtime.stop(0.0)

    return RuntimeStep


def _num_answers(worker: Untyped) -> tuple[int, int] | None:
    """How often Redis has answered this connection's questions for messages; None while there is no connection."""
    consumer = worker.consumer and worker.consumer.task_consumer
    if not consumer or consumer.channel is None:
        return None
    return id(consumer.channel), consumer.channel.num_answers


class CeleryLogFilter(logging.Filter):
    """Makes debug lines of what we log ourselves with the job's ids, and drops the tasks' arguments.

    Celery says that each task was received and succeeded, but not for which job, and what its prefetch count is after
    each reconnection. It warns with ten lines of traceback whenever a message goes back, which is how a full, draining
    or unwell worker passes a unit on: 640 times in five minutes of fault injection. A unit's failure is logged by its
    runner. Arguments of `millrace.submit` hold the producer's own notes.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged."""
        record.__dict__.pop("data", None)
        is_known = record.exc_info is not None and isinstance(record.exc_info[1], Reject | UnitFailed)
        if record.levelno > logging.INFO and not is_known:
            return True
        record.levelno, record.levelname, record.exc_info = logging.DEBUG, "DEBUG", None
        return logging.getLogger().isEnabledFor(logging.DEBUG)
