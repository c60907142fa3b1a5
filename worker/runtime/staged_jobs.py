"""Accepts the jobs of producers that use Celery alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import redis

from worker.broker.messages import Announcer, MessageEnd
from worker.registry.connect import is_refusal
from worker.registry.errors import InvalidJobId, InvalidOption, RegistryError
from worker.registry.intake import JobIntake, checked_options
from worker.registry.keys import Keys, UnitRef
from worker.schemas import BatchError

RETRY_WAIT_S = 1.0  # before the message goes back: keeps it from going round without rest

logger = logging.getLogger(__name__)


class StagedJobs:
    """Submits jobs whose lines the producer wrote to Redis itself before it sent `millrace.submit`."""

    def __init__(self, intake: JobIntake, keys: Keys, announcer: Announcer) -> None:
        self._intake = intake
        self._keys = keys
        self._announcer = announcer

    def submit(self, job_id: object, num_lines: object, options: Mapping[str, object]) -> MessageEnd:
        """Accept the job, or store the reason for refusing it in its status.

        No reaper knows of the job yet, so while Redis is away the message must go back, after a short wait.
        """
        try:
            checked_id = self._keys.check_job_id(job_id)
        except InvalidJobId as error:
            logger.warning("a job was not submitted: %s", error)
            return MessageEnd.DONE
        try:
            self._submit_or_refuse(checked_id, num_lines, options)
        except redis.RedisError as error:
            if is_refusal(error):  # its keys are broken: it can be neither accepted nor refused
                logger.error("the job was not submitted: %s", error, extra={"job_id": checked_id})
                return MessageEnd.DONE
            logger.warning(
                "the job could not be submitted, its message goes back: %s", error, extra={"job_id": checked_id}
            )
            time.sleep(RETRY_WAIT_S)
            return MessageEnd.REQUEUE
        return MessageEnd.DONE

    def _submit_or_refuse(self, job_id: str, num_lines: object, options: Mapping[str, object]) -> None:
        refusal = self._try_to_submit(job_id, num_lines, options)
        if refusal is None:
            logger.info("job accepted", extra={"job_id": job_id, "prompts": num_lines})
            return
        logger.warning("the job was refused: %s", refusal.message, extra={"job_id": job_id})
        self._intake.refuse(job_id, refusal, "default")

    def _try_to_submit(self, job_id: str, num_lines: object, options: Mapping[str, object]) -> BatchError | None:
        """None, or why the job is refused. Raises redis.RedisError when Redis cannot be had."""
        if type(num_lines) is not int:  # a bool is no number
            return _invalid(f"n is {str(num_lines)[:40]!r}; accepted: the number of lines", param="n")
        try:
            checked = checked_options(options)
            accepted_id, should_announce = self._intake.submit(job_id, num_lines, checked)
        except InvalidOption as error:
            return _invalid(str(error), param=error.name)
        except RegistryError as error:
            return BatchError(code=error.code, message=str(error))
        except redis.RedisError as error:
            if not is_refusal(error):
                raise
            return _invalid(f"Redis cannot take it as it is staged ({error}); accepted: a hash of index and line")
        if accepted_id != job_id:
            self._intake.discard(job_id)
            return _invalid(f"its idempotency_key belongs to job {accepted_id}", param="idempotency_key")
        if should_announce:
            self._announcer.announce(UnitRef.plan(job_id), checked.priority)
        return None


def _invalid(message: str, *, param: str | None = None) -> BatchError:
    return BatchError(code="invalid_request", message=message, param=param)
