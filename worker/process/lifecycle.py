"""When the worker's threads start and stop, relative to Celery's."""

from __future__ import annotations

from celery import bootsteps

from worker.broker.untyped import Untyped
from worker.process.activity import TICK_INTERVAL_S
from worker.process.worker_runtime import WorkerRuntime


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
