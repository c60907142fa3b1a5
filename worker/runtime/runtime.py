"""Starts and stops the parts of a worker, which build.py makes, and answers Celery's tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from engine.checkpoint.files import fingerprint
from worker.broker.messages import MessageEnd
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import StopReason
from worker.requests.served_model import ServedModel
from worker.requests.step_engine import served_endpoints
from worker.runtime.build import WorkerParts, package_version

RELEASE_TIMEOUT_S = 5.0  # for units to be given back once they were told to stop
THREAD_TIMEOUT_S = 5.0  # for each thread to end

logger = logging.getLogger(__name__)


class WorkerRuntime:
    """The engine's thread, the threads around it, and what Celery's tasks call. A process has one."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts

    @property
    def worker_id(self) -> str:
        """Host, process and six random digits: the owner of this worker's leases."""
        return self._parts.worker_id

    @property
    def drain_timeout_s(self) -> float:
        """How long running prompts may still finish on stop."""
        return self._parts.settings.worker.drain_timeout_s

    @property
    def has_failed(self) -> bool:
        """Whether the engine, or a thread around it, broke."""
        return self._parts.state.has_failed

    def load(self) -> None:
        """Check that Redis may be trusted and that the model's names and metrics.port are free, then load the engine.

        That may take minutes. Other workers are told what is served once it is.

        Raises redis.RedisError, SettingsError, EngineError.
        """
        parts = self._parts
        parts.client.ping()
        parts.trust.check()
        if parts.metrics is not None:
            parts.metrics.start()
        announcement = parts.announcement.model_copy(update={"fingerprint": fingerprint(parts.settings.model)})
        parts.directory.check(announcement)
        logger.info("loading the model", extra={"model": parts.model_name})
        engine = parts.engine.start()
        parts.shards.serve(ServedModel(engine, parts.settings.model))
        endpoints = served_endpoints(
            generates=engine.generates, compares=engine.makes_comparable_embeddings, classifier=engine.classifier
        )
        loaded = {"endpoints": endpoints, "context_tokens": engine.max_model_len}
        parts.directory.announce(announcement.model_copy(update=loaded))

    def start(self) -> None:
        """Start the threads around the engine."""
        parts = self._parts
        for thread in (*parts.threads, parts.watchdog):
            thread.start()
        parts.state.phase = "up"
        concurrency = parts.settings.worker.concurrency
        fields = {"model": parts.model_name, "version": package_version(), "concurrency": concurrency}
        logger.info("worker %s is up", self.worker_id, extra=fields)

    def tick(self, num_answers: object) -> None:
        """Note that Celery's event loop turns; see Activity.tick."""
        self._parts.activity.tick(num_answers)

    def submit(self, job_id: str, num_lines: int, options: Mapping[str, object]) -> MessageEnd:
        """Accept a job that a plain Celery producer staged, or note why it is refused."""
        with self._parts.activity.task():
            return self._parts.staged_jobs.submit(job_id, num_lines, options)

    def plan(self, message_id: str, job_id: str) -> MessageEnd:
        """Plan a job."""
        with self._parts.activity.task():
            return self._parts.runner.run(UnitRef.plan(job_id), message_id, self._parts.planner.plan)

    def run_shard(self, message_id: str, job_id: str, number: int) -> MessageEnd:
        """Run a shard."""
        with self._parts.activity.task():
            return self._parts.runner.run(UnitRef.shard(job_id, number), message_id, self._parts.shards.run)

    def interrupt(self, message_id: str) -> None:
        """Give the unit of a message back at once."""
        self._parts.held_units.stop_message(message_id, StopReason.RELEASED)

    def stop(self, drain_timeout_s: float) -> None:
        """Claim no more, wait for what runs, give back what is left after `drain_timeout_s`, stop every thread.

        Takes at most 37 s longer than that, even if the engine and Redis hang. A second call does nothing.
        """
        parts = self._parts
        if parts.state.phase != "up":
            return
        parts.state.phase = "draining"
        logger.info("worker %s stops", self.worker_id, extra={"units": len(parts.held_units)})
        # From here on Celery's event loop stands still while this thread waits.
        parts.watchdog.stop(THREAD_TIMEOUT_S)
        parts.runner.drain()
        if not parts.held_units.wait_empty(drain_timeout_s):
            parts.held_units.stop_all(StopReason.RELEASED)
            if not parts.held_units.wait_empty(RELEASE_TIMEOUT_S):
                logger.warning("%d units could not be given back: their leases run out", len(parts.held_units))
        for thread in reversed(parts.threads):
            thread.stop(THREAD_TIMEOUT_S)
        if not parts.engine.stop(THREAD_TIMEOUT_S):
            logger.warning("the engine hangs in a step and is left behind")
        parts.tracing.close()
        if parts.metrics is not None:
            parts.metrics.close()
        parts.client.close()
