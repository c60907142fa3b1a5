"""Jobs of producers that speak Celery and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import redis
from pydantic import ValidationError

from settings import Settings
from worker.broker.announcer import Announcer
from worker.registry.admission_limits import AdmissionLimits
from worker.registry.errors import InvalidJobId, RegistryError
from worker.registry.job_intake import JobIntake
from worker.registry.keys import Keys
from worker.registry.unit_ref import UnitRef
from worker.schemas.submit_options import SubmitOptions

logger = logging.getLogger(__name__)


class StagedJobs:
    """Submits jobs whose lines a producer wrote to Redis itself, before it sent `millrace.submit`."""

    def __init__(self, client: redis.Redis, keys: Keys, announcer: Announcer, *, settings: Settings) -> None:
        self._keys = keys
        self._announcer = announcer
        self._intake = JobIntake(
            client,
            keys,
            redis_settings=settings.redis,
            limits=settings.limits,
            admission=AdmissionLimits.from_settings(settings.limits),
            grace_s=settings.worker.reap_grace_s,
        )

    def submit(self, job_id: object, num_lines: object, options: Mapping[str, object]) -> None:
        """Accept the job, or remember why not: its status says so then. Raises redis.RedisError."""
        try:
            checked_id = self._keys.check_job_id(job_id)
        except InvalidJobId as error:
            logger.warning("a job was not submitted: %s", error)
            return
        reason = self._try_to_submit(checked_id, num_lines, options)
        if reason is not None:
            logger.warning("job %s was refused: %s", checked_id, reason)
            known = num_lines if type(num_lines) is int and num_lines > 0 else 0
            self._intake.refuse(checked_id, known, reason, "default")

    def _try_to_submit(self, job_id: str, num_lines: object, options: Mapping[str, object]) -> str | None:
        """None, or why the job is refused."""
        if type(num_lines) is not int:  # a bool is no number
            return f"n is {str(num_lines)[:40]!r}; accepted: the number of lines"
        try:
            checked = SubmitOptions.model_validate(options)
            accepted_id, is_new = self._intake.submit(job_id, num_lines, checked)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except RegistryError as error:
            return str(error)
        if accepted_id != job_id:
            self._intake.discard(job_id)
            return f"its idempotency_key belongs to job {accepted_id}"
        if is_new:
            self._announcer.announce(UnitRef.plan(job_id), checked.priority)
        return None
