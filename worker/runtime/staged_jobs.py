"""Accepts the jobs of producers that use Celery alone."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping

import redis

from worker.broker.messages import Announcer, MessageEnd
from worker.registry.connect import is_refusal
from worker.registry.errors import InvalidJobId, InvalidOption, JobReused, RedisFull, RegistryError
from worker.registry.intake import JobIntake, checked_options
from worker.registry.keys import Keys, UnitRef
from worker.schemas import BatchError

RETRY_WAIT_S = 1.0  # before the message goes back: keeps it from going round without rest

NONCE = "nonce"  # of the message: its lines are staged under a name that this is a part of
_NONCE = re.compile(r"[A-Za-z0-9_-]{0,64}")

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
        refusal: BatchError | None
        nonce = options.get(NONCE, "")
        others = {name: value for name, value in options.items() if name != NONCE}
        if not isinstance(nonce, str) or _NONCE.fullmatch(nonce) is None:
            nonce, refusal = "", _invalid(f"{NONCE} has another form; accepted: 1 to 64 of A-Za-z0-9_-", param=NONCE)
        elif type(num_lines) is not int:  # a bool is no number
            refusal = _invalid(f"n is {str(num_lines)[:40]!r}; accepted: the number of lines", param="n")
        else:
            refusal = self._try_to_submit(job_id, num_lines, others, nonce)
        if refusal is None:
            logger.info("job accepted", extra={"job_id": job_id, "prompts": num_lines})
            return
        logger.warning("the job was refused: %s", refusal.message, extra={"job_id": job_id})
        self._intake.refuse(job_id, refusal, "default", nonce, others.get("on_done"))

    def _try_to_submit(
        self, job_id: str, num_lines: int, options: Mapping[str, object], nonce: str
    ) -> BatchError | None:
        """None, or why the job is refused. Raises redis.RedisError when Redis cannot be had, or is full."""
        try:
            checked = checked_options(options)
            staged = self._intake.read_staged(job_id, num_lines, nonce)
            accepted_id, should_announce = self._intake.submit(job_id, num_lines, checked, staged)
        except InvalidOption as error:
            return _invalid(str(error), param=error.name)
        except JobReused as error:
            return _reused(error)
        except RedisFull:
            raise
        except RegistryError as error:
            return BatchError(code=error.code, message=str(error))
        except redis.RedisError as error:
            if not is_refusal(error):
                raise
            return _invalid(f"Redis cannot take it as it is staged ({error}); accepted: a hash of index and line")
        if accepted_id != job_id:
            self._intake.discard(job_id, nonce)
            return _invalid(f"its idempotency_key belongs to job {accepted_id}", param="idempotency_key")
        if should_announce:
            self._announcer.announce(UnitRef.plan(job_id), checked.priority)
        return None


def _reused(error: JobReused) -> BatchError:
    """Without the key, which may be the user's own words: refusals are logged."""
    if error.idempotency_key is None:
        return _invalid(f"job {error.job_id} was accepted with other {error.other}")
    message = f"its idempotency_key belongs to job {error.job_id}, which has other {error.other}"
    return _invalid(message, param="idempotency_key")


def _invalid(message: str, *, param: str | None = None) -> BatchError:
    return BatchError(code="invalid_request", message=message, param=param)
