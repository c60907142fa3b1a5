"""Takes jobs into the registry: stages their lines, checks quotas and accepts them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence

import redis
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from settings import LimitSettings, Settings
from worker.lines.strict_json import shorten
from worker.registry.errors import EmptyJob, InvalidOption, JobIncomplete, JobTooLarge, QueueFull, RegistryError
from worker.registry.exchange import RedisReply, Scripts, ask_one, text
from worker.registry.keys import Keys, UnitRef
from worker.schemas import BatchError, SubmitOptions

UNKNOWN_RATE_RETRY_S = 30.0  # before the first ten seconds of work are measured
MAX_RETRY_S = 3600.0

# Options whose values are the producer's own words: a refusal is logged, and logs hold no such words.
_OWN_WORDS = frozenset({"metadata", "idempotency_key"})


def checked_options(options: Mapping[str, object]) -> SubmitOptions:
    """The options of a job. Raises InvalidOption for one that is unknown, or whose value is not accepted."""
    try:
        return SubmitOptions.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    raise _invalid_option(first)


def _invalid_option(fault: ErrorDetails) -> InvalidOption:
    option, value = str(fault["loc"][0]), fault["input"]
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(option, SubmitOptions.model_fields, n=1, cutoff=0.7)
        accepted = ", ".join(near or SubmitOptions.model_fields)
        return InvalidOption(option, "is not an option of a job", accepted=accepted)
    name = ".".join(str(part) for part in fault["loc"] if part != "[key]")
    if option not in _OWN_WORDS:
        problem = f"is {shorten(value)}"
    elif isinstance(value, str):
        problem = f"has {len(value)} characters"
    else:
        problem = f"is of type {type(value).__name__}"
    return InvalidOption(name, problem, accepted=SubmitOptions.accepted(option))


class JobIntake:
    """Stages lines and submits jobs. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys, settings: Settings) -> None:
        self._client = client
        self._keys = keys
        self._redis_settings = settings.redis
        self._limits = settings.limits
        self._grace_s = settings.worker.reap_grace_s  # before a job whose plan message got lost is announced again

    def find(self, tenant: str, idempotency_key: str) -> str | None:
        """The job submitted earlier under a producer's own key."""
        known = self._client.get(self._keys.idempotency(tenant, idempotency_key))
        return None if known is None else text(known)

    def stage(self, job_id: str, first_index: int, lines: Sequence[bytes]) -> bool:
        """Add lines of a new job from `first_index` on. False, and nothing is stored, if it was accepted already."""
        rows = enumerate(lines, first_index)
        return bool(ask_one(self._client, Scripts.STAGE(self._of_job(job_id), rows, staging_ms=self._staging_ms)))

    def discard(self, job_id: str) -> None:
        """Forget staged lines that are not to be submitted; those of an accepted job are left alone."""
        ask_one(self._client, Scripts.DISCARD(self._of_job(job_id)))

    def submit(self, job_id: str, num_lines: int, options: SubmitOptions) -> tuple[str, bool]:
        """Accept the job whose lines 0 .. num_lines - 1 are staged: (its id, whether its plan is to be announced).

        A job that was accepted before, under this id or the options' idempotency key, is returned as it is. One of
        this id that nobody has planned is to be announced again: the first answer may have been lost on its way, and
        the second message does no harm. Staged lines that are refused are forgotten after redis.staging_ttl_s.
        Raises EmptyJob, JobTooLarge, JobIncomplete, QueueFull.
        """
        if num_lines < 1:
            raise EmptyJob
        keys = {**self._of_job(job_id), "tenant_counters": self._keys.tenant_counters(options.tenant)}
        script = Scripts.SUBMIT
        if options.idempotency_key is not None:
            script = Scripts.SUBMIT_ONCE
            keys["idempotency"] = self._keys.idempotency(options.tenant, options.idempotency_key)
        job = json.dumps(self._arguments(job_id, num_lines, options))
        reply = ask_one(self._client, script(keys, job=job))
        status = text(reply[0])
        if status == "accepted":
            return job_id, True
        if status == "known":
            return text(reply[1]), text(reply[2]) == "queued"
        raise _refusal(status, reply, num_lines)

    def refuse(self, job_id: str, error: BatchError, tenant: str) -> None:
        """Remember as failed a job whose producer does not wait for the answer; its lines are forgotten in time."""
        call = Scripts.REFUSE(
            self._of_job(job_id),
            job_id=job_id,
            reason=error.message,
            errors=json.dumps([error.model_dump()]),
            tenant=tenant,
            retain_ms=self._retain_ms,
            staging_ms=self._staging_ms,
        )
        ask_one(self._client, call)

    def _of_job(self, job_id: str) -> dict[str, str]:
        return self._keys.of_unit_scripts(UnitRef.plan(job_id))

    @property
    def _retain_ms(self) -> int:
        return round(self._redis_settings.result_ttl_s * 1000)

    @property
    def _staging_ms(self) -> int:
        return round(self._redis_settings.staging_ttl_s * 1000)

    def _arguments(self, job_id: str, num_lines: int, options: SubmitOptions) -> dict[str, object]:
        return {
            "job_id": job_id,
            "n": num_lines,
            "spec": json.dumps({"metadata": options.metadata}),
            "strict": int(options.strict),
            "endpoint": options.endpoint or "",
            "model": options.model or "",
            "trace": options.traceparent or "",
            "tenant": options.tenant,
            "priority": options.priority,
            "deadline_ms": round(options.deadline_s * 1000) if options.deadline_s else 0,
            "grace_ms": round(self._grace_s * 1000),
            "staging_ms": self._staging_ms,
            "retain_ms": self._retain_ms,
            "max_prompts": self._limits.max_prompts_per_job,
            "max_bytes": self._limits.max_job_bytes,
            "limits": list(_quotas(self._limits)),
        }


def _refusal(status: str, reply: RedisReply, num_lines: int) -> RegistryError:
    if status == "too_large":
        return JobTooLarge(text(reply[1]), int(reply[2]), int(reply[3]))
    if status == "incomplete":
        return JobIncomplete(num_lines, int(reply[1]), int(reply[2]))
    used, asked, limit = int(reply[3]), int(reply[4]), int(reply[5])
    rate_per_s, open_prompts = float(reply[6]), int(reply[7])
    return QueueFull(
        scope=text(reply[1]),
        resource=text(reply[2]),
        used=used,
        asked=asked,
        limit=limit,
        retry_after_s=_retry_after_s(used + asked - limit, used, open_prompts, rate_per_s),
    )


def _retry_after_s(excess: int, used: int, open_prompts: int, rate_per_s: float) -> float:
    """How long until `excess` of `used` has drained, if it drains as fast as prompts did lately."""
    if rate_per_s <= 0 or used <= 0:
        return UNKNOWN_RATE_RETRY_S
    return min(max(open_prompts / rate_per_s * min(excess / used, 1.0), 1.0), MAX_RETRY_S)


def _quotas(limits: LimitSettings) -> Iterator[dict[str, str | int]]:
    """How much may be outstanding, of all jobs and of a tenant's, as submit.lua reads it; without what has no limit."""
    for scope, resource, most in (
        ("all", "prompts", limits.max_open_prompts),
        ("all", "bytes", limits.max_open_bytes),
        ("all", "jobs", limits.max_open_jobs),
        ("tenant", "prompts", limits.max_tenant_prompts),
        ("tenant", "bytes", limits.max_tenant_bytes),
        ("tenant", "jobs", limits.max_tenant_jobs),
    ):
        if most is not None:
            yield {"scope": scope, "resource": resource, "most": most}
