"""Takes jobs into the registry: stages their lines, checks quotas and accepts them."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import redis
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from settings import LimitSettings, Settings
from worker.lines.strict_json import shorten
from worker.registry.callbacks import CallbackTarget, allowed_target
from worker.registry.errors import (
    EmptyJob,
    FileUnknown,
    InvalidOption,
    JobIncomplete,
    JobReused,
    JobTooLarge,
    LinesChanged,
    QueueFull,
    RedisFull,
    RegistryError,
)
from worker.registry.exchange import RedisReply, ask, ask_one, raw_values, text
from worker.registry.keys import Keys, UnitRef
from worker.registry.lua import Scripts
from worker.schemas import BatchError, SubmitOptions

UNKNOWN_RATE_RETRY_S = 30.0  # before the first ten seconds of work are measured
MAX_RETRY_S = 3600.0
# Of a plain Celery producer's job, read at once to know which lines it has: so many that are not larger, or one line.
READ_LINES, READ_BYTES = 500, 1024 * 1024

# Options whose values are the producer's own words, or may hold a secret: a refusal is logged, and logs hold neither.
_OWN_WORDS = frozenset({"metadata", "idempotency_key", "on_done"})


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


@dataclass(frozen=True, slots=True)
class Staged:
    """What a producer knows of the lines that it staged, so that its job gets these and no others."""

    nonce: str = (
        ""  # they wait under this name of their submit; "": where the job's lines are, as plain producers have it
    )
    num_bytes: int = -1  # of all lines; -1: not known
    digest: str = ""  # see LineDigest; "": not known


UNKNOWN_LINES = Staged()


class LineDigest:
    """Which lines a job has, in their order: SHA-256 over the length and the bytes of each, taken as they pass."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.num_lines = self.num_bytes = 0

    def add(self, lines: Sequence[bytes]) -> None:
        """Take the next lines."""
        self._hash.update(b"".join(b"%d:%b" % (len(line), line) for line in lines))
        self.num_lines += len(lines)
        self.num_bytes += sum(map(len, lines))

    def staged(self, nonce: str) -> Staged:
        """These lines, staged under `nonce`."""
        return Staged(nonce, self.num_bytes, self._hash.hexdigest())


def parts_of(indices: range, sizes: Sequence[int]) -> Iterator[range]:
    """`indices` of lines of these sizes, in parts that come to READ_BYTES at most, or of one line."""
    first = num_bytes = 0
    for place, size in enumerate(sizes):
        if place > first and num_bytes + size > READ_BYTES:
            yield indices[first:place]
            first, num_bytes = place, 0
        num_bytes += size
    yield indices[first:]


def is_out_of_memory(error: Exception) -> bool:
    """Whether Redis says that it has no memory left, in the words of any of its versions."""
    is_answer = isinstance(error, redis.ResponseError)
    return is_answer and (
        isinstance(error, redis.exceptions.OutOfMemoryError) or re.search(r"\bOOM\b", str(error)) is not None
    )


@contextmanager
def _full_redis_named() -> Iterator[None]:
    """Raise RedisFull where Redis has no memory left."""
    try:
        yield
    except redis.ResponseError as error:
        if is_out_of_memory(error):
            raise RedisFull from error
        raise


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

    def check(self, options: SubmitOptions) -> None:
        """Raise InvalidOption for a callback that `limits.callback_*` do not allow."""
        if options.on_done is not None:
            CallbackTarget.checked(options.on_done, self._limits)

    def stage(self, job_id: str, first_index: int, lines: Sequence[bytes], nonce: str = "") -> bool:
        """Add lines of a new job from `first_index` on. False, and nothing is stored, if it was accepted already.

        `nonce`: of this submit, so that another of the same job does not mix its lines with these. Raises RedisFull.
        """
        rows = enumerate(lines, first_index)
        try:
            with _full_redis_named():
                call = Scripts.STAGE(self._of_job(job_id, nonce), rows, staging_ms=self._staging_ms)
                return bool(ask_one(self._client, call))
        except RedisFull:  # which does not even begin a function
            state = self._client.hget(self._keys.job(job_id), "st")
            if state is None or text(state) == "refused":
                raise
            return False

    def copy(self, job_id: str, file_id: str, nonce: str) -> None:
        """Stage the lines of an uploaded file, which stays. Raises FileUnknown, RedisFull."""
        keys = {"file_lines": self._keys.file_lines(file_id), "staged": self._keys.staged(job_id, nonce)}
        with _full_redis_named():
            is_there = ask_one(self._client, Scripts.COPY_FILE(keys, staging_ms=self._staging_ms))
        if not is_there:
            raise FileUnknown(file_id)

    def discard(self, job_id: str, nonce: str = "") -> None:
        """Forget staged lines that are not to be submitted; those of an accepted job are left alone."""
        if nonce:
            self._client.unlink(self._keys.staged(job_id, nonce))
        else:
            ask_one(self._client, Scripts.DISCARD(self._of_job(job_id)))

    def read_staged(self, job_id: str, num_lines: int, nonce: str) -> Staged:
        """Which lines somebody else has staged, read in small parts.

        Without a digest where some are missing or they are too many or too large for a job, so that it is refused.
        """
        digest, key = LineDigest(), self._keys.staged(job_id, nonce)
        if num_lines > self._limits.max_prompts_per_job:
            return Staged(nonce)
        for start in range(0, num_lines, READ_LINES):
            page = range(start, min(start + READ_LINES, num_lines))
            sizes = ask(self._client, [("HSTRLEN", key, index) for index in page])
            if digest.num_bytes + sum(sizes) > self._limits.max_job_bytes:
                return Staged(nonce)
            for indices in parts_of(page, sizes):
                lines = [line for line in raw_values(self._client.hmget(key, *map(str, indices))) if line is not None]
                if len(lines) < len(indices):
                    return Staged(nonce)
                digest.add(lines)
        return digest.staged(nonce)

    def submit(
        self, job_id: str, num_lines: int, options: SubmitOptions, staged: Staged = UNKNOWN_LINES
    ) -> tuple[str, bool]:
        """Accept the job whose lines 0 .. num_lines - 1 are staged: (its id, whether its plan is to be announced).

        A job that was accepted before with these lines, under this id or the options' idempotency key, is returned as
        it is. One of this id that nobody has planned is to be announced again: the first answer may have been lost on
        its way, and the second message does no harm. Staged lines that are refused are forgotten after
        redis.staging_ttl_s. Raises InvalidOption, EmptyJob, JobTooLarge, JobIncomplete, JobReused, QueueFull,
        RedisFull.
        """
        self.check(options)
        if num_lines < 1:
            raise EmptyJob
        keys = self._of_job(job_id, staged.nonce)
        keys["tenant_counters"] = self._keys.tenant_counters(options.tenant)
        if options.idempotency_key is not None:
            keys["idempotency"] = self._keys.idempotency(options.tenant, options.idempotency_key)
        reply = self._ask_to_accept(keys, self._arguments(job_id, num_lines, options, staged))
        status = text(reply[0])
        if status == "accepted":
            return job_id, True
        if status == "known":
            return text(reply[1]), text(reply[2]) == "queued"
        if status == "reused":
            first_id = text(reply[1])
            raise JobReused(first_id, text(reply[2]), None if first_id == job_id else options.idempotency_key)
        raise _refusal(status, reply, num_lines)

    def _ask_to_accept(self, keys: Mapping[str, str], arguments: dict[str, object]) -> RedisReply:
        """What submit.lua answers. Raises RedisFull only if the job is not known: the first answer may be lost."""
        is_once = "idempotency" in keys
        try:
            with _full_redis_named():
                script = Scripts.SUBMIT_ONCE if is_once else Scripts.SUBMIT
                return ask_one(self._client, script(keys, job=json.dumps(arguments)))
        except RedisFull:
            find = Scripts.FIND_ONCE if is_once else Scripts.FIND
            reply = ask_one(self._client, find(keys, job=json.dumps({**arguments, "only_known": 1})))
            if text(reply[0]) == "unknown":
                raise
            return reply

    def refuse(self, job_id: str, error: BatchError, tenant: str, nonce: str = "", on_done: object = None) -> None:
        """Remember as failed a job whose producer does not wait for the answer; its lines are forgotten in time.

        `on_done`: whom to tell, as the producer wrote it; nobody, where that is not allowed.
        """
        call = Scripts.REFUSE(
            self._of_job(job_id, nonce),
            job_id=job_id,
            reason=error.message,
            errors=json.dumps([error.model_dump()]),
            tenant=tenant,
            retain_ms=self._retain_ms,
            staging_ms=self._staging_ms,
            on_done=allowed_target(on_done, self._limits),
        )
        ask_one(self._client, call)

    def _of_job(self, job_id: str, nonce: str = "") -> dict[str, str]:
        return self._keys.of_unit_scripts(UnitRef.plan(job_id)) | {"staged": self._keys.staged(job_id, nonce)}

    @property
    def _retain_ms(self) -> int:
        return round(self._redis_settings.result_ttl_s * 1000)

    @property
    def _staging_ms(self) -> int:
        return round(self._redis_settings.staging_ttl_s * 1000)

    def _arguments(self, job_id: str, num_lines: int, options: SubmitOptions, staged: Staged) -> dict[str, object]:
        return {
            "job_id": job_id,
            "n": num_lines,
            "bytes": staged.num_bytes,
            "digest": staged.digest,
            "spec": json.dumps(_spec(options)),
            "strict": int(options.strict),
            "endpoint": options.endpoint or "",
            "model": options.model or "",
            "on_done": options.on_done or "",
            "trace": options.traceparent or "",
            "tenant": options.tenant,
            "priority": options.priority,
            "deadline_ms": round(options.deadline_s * 1000) if options.deadline_s else 0,
            "grace_ms": round(self._grace_s * 1000),
            "staging_ms": self._staging_ms,
            "retain_ms": round(options.result_ttl_s * 1000) if options.result_ttl_s else self._retain_ms,
            "max_prompts": self._limits.max_prompts_per_job,
            "max_bytes": self._limits.max_job_bytes,
            "limits": list(_quotas(self._limits)),
        }


def _spec(options: SubmitOptions) -> dict[str, object]:
    """What a job's status and a retry of it tell of its options, and no script reads."""
    given = {"input_file_id": options.input_file_id, "result_ttl_s": options.result_ttl_s}
    return {"metadata": options.metadata} | {name: value for name, value in given.items() if value is not None}


def _refusal(status: str, reply: RedisReply, num_lines: int) -> RegistryError:
    if status == "too_large":
        return JobTooLarge(text(reply[1]), int(reply[2]), int(reply[3]))
    if status == "incomplete":
        return JobIncomplete(num_lines, int(reply[1]), int(reply[2]))
    if status == "changed":
        return LinesChanged(int(reply[1]), int(reply[2]))
    used, asked, limit = int(reply[3]), int(reply[4]), int(reply[5])
    rate_per_s, open_prompts, until_room_ms = float(reply[6]), int(reply[7]), int(reply[8])
    retry_after_s = _retry_after_s(used + asked - limit, used, open_prompts, rate_per_s)
    if text(reply[2]) == "result_bytes":  # there is room when the first results are forgotten
        retry_after_s = max(until_room_ms / 1000, 1.0) if until_room_ms >= 0 else UNKNOWN_RATE_RETRY_S
    return QueueFull(
        scope=text(reply[1]),
        resource=text(reply[2]),
        used=used,
        asked=asked,
        limit=limit,
        retry_after_s=retry_after_s,
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
        ("tenant", "result_bytes", limits.max_tenant_result_bytes),
    ):
        if most is not None:
            yield {"scope": scope, "resource": resource, "most": most}
