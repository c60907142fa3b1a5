"""Registers the Celery tasks, which hand a message's ids to the runtime and its verdict back to Celery."""

from __future__ import annotations

from celery import Celery, Task
from celery.exceptions import Reject

from worker.broker.messages import PLAN_TASK, RUN_SHARD_TASK, MessageEnd
from worker.registry.exchange import Untyped
from worker.runtime.runtime import WorkerRuntime

SUBMIT_TASK = "millrace.submit"


def register_tasks(app: Celery, runtime: WorkerRuntime) -> None:
    """Give `app` the worker's tasks, bound to `runtime`."""
    base = type(
        "RuntimeTask",
        (Task,),
        {"abstract": True, "Request": "worker.broker.celery_guards:InterruptibleRequest", "runtime": runtime},
    )

    # Not shared: Celery would give them to every other app of the process too.
    # No events: the message holds the producer's own notes, and Celery would send them to Flower.
    @app.task(name=SUBMIT_TASK, base=base, shared=False, send_events=False)  # type: ignore[untyped-decorator]  # celery has no types
    def submit(job_id: str, n: int, **options: Untyped) -> None:
        """Accept a job whose lines a plain Celery producer has staged."""
        _conclude(runtime.submit(job_id, n, options))

    @app.task(name=PLAN_TASK, base=base, shared=False, bind=True)  # type: ignore[untyped-decorator]  # the same
    def plan(task: Task, job_id: str) -> None:
        """Cut a job into shards."""
        _conclude(runtime.plan(task.request.id, job_id))

    @app.task(name=RUN_SHARD_TASK, base=base, shared=False, bind=True)  # type: ignore[untyped-decorator]  # the same
    def run_shard(task: Task, job_id: str, shard: int) -> None:
        """Run one shard of a job."""
        _conclude(runtime.run_shard(task.request.id, job_id, shard))


def _conclude(end: MessageEnd) -> None:
    if end is MessageEnd.REQUEUE:
        raise Reject("given back", requeue=True)
