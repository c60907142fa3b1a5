"""What `millrace worker` runs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery import signals
from celery.app import trace
from celery.exceptions import CPendingDeprecationWarning
from celery.platforms import SecurityWarning
from celery.worker import state, strategy
from celery.worker.consumer import consumer

from settings import EffectiveSettings
from worker.app import create_app
from worker.broker.first_event import send_first_event
from worker.broker.quiet_worker import QuietWorker
from worker.broker.untyped import Untyped
from worker.process.celery_log_filter import CeleryLogFilter
from worker.process.lifecycle import worker_step
from worker.process.worker_runtime import WorkerRuntime
from worker.requests.step_engine import StepEngine
from worker.tasks import register_tasks

logger = logging.getLogger(__name__)


def run_worker(
    effective: EffectiveSettings,
    load_engine: Callable[[EffectiveSettings], StepEngine],
    exit_process: Callable[[int], object] = os._exit,
) -> int:
    """Run a worker on the main thread of this process until a signal, or an engine that broke or hung, ends it; the
    exit code.

    0 after SIGTERM, once running prompts finished or were given back, and after SIGQUIT, which gives them back at
    once; 1 after SIGINT, otherwise as SIGTERM; 70 (EX_SOFTWARE) if the engine or a thread around it broke or hung,
    for a supervisor to start another.
    Raises redis.RedisError if Redis cannot be had, and what `load_engine` raises: both before any work is taken.
    """
    settings = effective.settings
    app = create_app(settings)
    app.events.dispatcher_cls = "worker.broker.lossy_dispatcher:LossyDispatcher"
    runtime = WorkerRuntime(app, settings, lambda: load_engine(effective), on_failure=_ask_celery_to_stop)
    runtime.load()
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
        exit_process(os.EX_SOFTWARE)
        return os.EX_SOFTWARE
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
    # To root: about pickle, which is refused here, and about an option --uid, which is not ours.
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
