"""Defines what producers see of a job: options, state, counts, usage, errors, and OpenAI's batch object.

Pure pydantic: neither torch nor the engine is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from settings.fields import Accepted
from worker.lines.request_line import Endpoint
from worker.records.record import BatchFile

DEFAULT_PRIORITY = 5
ON_DONE_PATTERN = r"^(https?://[!-~]+|task:[A-Za-z0-9_.:-]+@[A-Za-z0-9_.-]+)$"

_MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
_MetadataValue = Annotated[str, StringConstraints(max_length=512)]

_UNITS_S = {"h": 3_600, "m": 60, "s": 1}  # hours at most: OpenAI's one window is called 24h


class _Frozen(BaseModel):
    """Cannot be changed, and has no fields but its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SubmitOptions(_Frozen):
    """A job's options: arguments of `BatchClient.submit`, and of the message of a plain Celery producer."""

    priority: Annotated[int, Accepted("a whole number, 0 to 9")] = Field(
        default=DEFAULT_PRIORITY, ge=0, le=9, description="0 runs first, 9 last."
    )
    deadline_s: Annotated[float | None, Accepted("seconds, above 0, at most 31536000 (a year)")] = Field(
        default=None, gt=0, le=31_536_000, allow_inf_nan=False, description="Seconds from submission; then it expires."
    )
    tenant: Annotated[str, Accepted("1 to 64 letters, digits, ., _ and - (ASCII)")] = Field(
        default="default",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Whose job it is; prompts of different tenants share no KV.",
    )
    metadata: Annotated[
        dict[_MetadataKey, _MetadataValue],
        Accepted("at most 16 pairs of text, keys of 1 to 64 characters, values of at most 512"),
    ] = Field(default_factory=dict, max_length=16, description="The producer's own notes.")
    idempotency_key: Annotated[str | None, Accepted("1 to 256 characters")] = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="A second submit of these lines with the key is the first job.",
    )
    endpoint: Annotated[Endpoint | None, Accepted(" or ".join(Endpoint))] = Field(
        default=None, description="The one all lines must name. None: each line its own, or, if strict, the first's."
    )
    model: Annotated[str | None, Accepted("a model's name, 1 to 256 characters")] = Field(
        default=None,
        max_length=256,
        pattern=r"^[^\p{C}\p{Zl}\p{Zp}]+$",
        description="The one of lines that name none; lines that name another fail. None: the only one that is served.",
    )
    strict: Annotated[bool, Accepted("true or false")] = Field(
        default=False, description="One bad line fails the job before any line runs; else that line fails alone."
    )
    result_ttl_s: Annotated[float | None, Accepted("seconds, 1 to 31536000 (a year)")] = Field(
        default=None,
        ge=1,
        le=31_536_000,
        allow_inf_nan=False,
        description="How long the job is kept after its end. None: redis.result_ttl_s.",
    )
    input_file_id: Annotated[str | None, Accepted("1 to 128 letters, digits, ., _ and - (ASCII)")] = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,128}$",
        description="What the batch object calls the file of its lines. None: a name made of the job's id.",
    )
    on_done: Annotated[str | None, Accepted("a URL, or task:NAME@QUEUE, at most 512 characters (ASCII)")] = Field(
        default=None,
        max_length=512,
        pattern=ON_DONE_PATTERN,
        description="Whom to tell that the job has ended: a URL of limits.callback_hosts, or a Celery task.",
    )
    traceparent: Annotated[str | None, Accepted("a W3C trace context, 00-<32 hex digits>-<16>-<2>")] = Field(
        default=None,
        pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$",
        description="W3C trace context of whoever submits: the job's spans are part of that trace.",
    )

    @classmethod
    def accepted(cls, option: str) -> str:
        """What is accepted for an option, in words. Raises KeyError where there is no such option."""
        marks = [mark.text for mark in cls.model_fields[option].metadata if isinstance(mark, Accepted)]
        return marks[0]


class SubmitArguments(TypedDict, total=False):
    """The fields of SubmitOptions, for type checkers; SubmitOptions checks the values and has the defaults."""

    priority: int
    deadline_s: float | None
    tenant: str
    metadata: Mapping[str, str]
    idempotency_key: str | None
    endpoint: str | None
    model: str | None
    strict: bool
    result_ttl_s: float | None
    input_file_id: str | None
    on_done: str | None
    traceparent: str | None


class JobState(StrEnum):
    """The OpenAI Batch API's states.

        validating -> in_progress -> completed
             |             |-> finalizing -> expired     its deadline passed: the rest gets batch_expired records
             |             `-> cancelling -> cancelled
             `-> failed    it was refused, or planning it crashed worker after worker

    `finalizing` is seen only on the way to `expired`: a job completes with its last record, there is nothing left to
    be done then. A deadline or a cancellation may come while a job is validating too; one that changes no record leaves
    it to complete. `completed` does not mean that every prompt succeeded: see the counts.
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @classmethod
    def in_redis(cls, word: str) -> Self:
        """The state of the word that the registry's scripts write into the job."""
        words = {"queued": "validating", "running": "in_progress", "done": "completed", "refused": "failed"}
        return cls(words.get(word, word))

    @property
    def is_terminal(self) -> bool:
        """Whether the job will not change any more."""
        return self in (JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED)


class RequestCounts(_Frozen):
    """Prompts of a job, counted from the records that were written."""

    total: int  # 0 for a file that was refused as a whole
    completed: int  # succeeded
    failed: int  # have no answer, as OpenAI counts: cancelled and expired prompts among them
    cancelled: int = 0  # of failed: nothing is wrong with them, the job was cancelled
    expired: int = 0  # of failed: likewise, the deadline passed

    @property
    def faulty(self) -> int:
        """Prompts that failed by a fault, of the line or of the engine."""
        return self.failed - self.cancelled - self.expired

    @property
    def finished(self) -> int:
        """Prompts that have their record."""
        return self.completed + self.failed


class JobUsage(_Frozen):
    """Tokens of the prompts that have their record."""

    input_tokens: int
    cached_tokens: int  # of input_tokens: their KV came from the prefix cache
    output_tokens: int
    reasoning_tokens: int = 0  # of output_tokens: the models' thinking, where it could be told from their answers
    resumed_tokens: int = 0  # of output_tokens: taken over from a stopped worker, not generated again
    total_tokens: int


class BatchError(_Frozen):
    """An entry of `errors.data` of OpenAI's batch object.

    Codes are Azure's, as far as it has one: empty_file, too_many_tasks, invalid_json_line, duplicate_custom_id,
    url_mismatch, model_mismatch, model_not_found, and invalid_request for any other fault of a line or an option. Ours:
    file_too_large, queue_full, and batch_failed where planning crashed worker after worker.
    """

    code: str
    message: str
    line: int | None = None  # from 1, blank lines not counted; None: the fault is the whole file's
    param: str | None = None  # path inside the line's body, a field of the line, or an option


class JobStatus(_Frozen):
    """A snapshot of one job. Times are Unix seconds by Redis' clock, with their fractions.

    `batch_object` turns it into OpenAI's batch object, which is what the command line prints as JSON.
    """

    id: str
    status: JobState
    endpoint: str = ""  # the one it was submitted for, else those its lines name, comma separated; "": not yet known
    model: str | None = None  # the one that runs its lines; None: not yet known, or there are several
    waiting_for: tuple[str, ...] = ()  # models of its lines that no worker serves
    created_at: float
    in_progress_at: float | None = None  # its shards were cut
    expires_at: float | None = None  # its deadline
    cancelling_at: float | None = None
    finished_at: float | None = None  # when it reached a terminal state, whichever
    results_expire_at: float | None = None  # when a finished job and its results are forgotten
    request_counts: RequestCounts
    usage: JobUsage
    result_bytes: int = 0  # of its records, as Redis keeps them
    shards_total: int  # 0 until it is planned
    shards_done: int
    priority: int
    tenant: str
    metadata: Mapping[str, str]
    input_file_id: str | None = None  # of the lines, as the producer named it
    failures: Mapping[str, int] = Field(default_factory=dict)  # by code: prompts without an answer, the most first
    error: str | None = None  # why it failed as a whole
    errors: tuple[BatchError, ...] = ()  # the same in parts, for programs; bad lines beyond the first hundred left out

    @property
    def progress(self) -> float:
        """Share of the prompts that have their record, 0 to 1."""
        return self.request_counts.finished / self.request_counts.total if self.request_counts.total else 1.0


class JobFilter(_Frozen):
    """Which jobs are listed: those for which everything that is said here is so."""

    states: tuple[JobState, ...] = ()  # one of these; empty: any
    tenant: str | None = None
    model: str | None = None
    since: float | None = None  # created at this time or later, Unix seconds

    def matches(self, job: JobStatus) -> bool:
        """Whether `job` is listed."""
        return (
            (not self.states or job.status in self.states)
            and self.tenant in (None, job.tenant)
            and self.model in (None, job.model)
            and (self.since is None or job.created_at >= self.since)
        )


ALL_JOBS = JobFilter()


class EngineLoad(BaseModel):
    """What a worker's engine is at, and what it did since it was loaded; fields of newer versions are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kv_blocks: int = 0  # that it has; 0: the model keeps no KV
    used_kv_blocks: int = 0  # of these, by prompts that run; what is kept for hits alone gives way to others
    prompt_tokens: int = 0  # of prompts that have ended
    cached_tokens: int = 0  # of prompt_tokens: found in the prefix cache


class WorkerInfo(_Frozen):
    """A worker's last heartbeat, at most half a minute old."""

    id: str
    version: str
    model: str
    steps: int  # engine steps since it started
    open_requests: int  # prompts in its engine
    held: int  # plans and shards it holds a lease on
    engine: EngineLoad | None = None  # None: it loads its model, or is of an older version


def batch_object(job: JobStatus) -> dict[str, object]:
    """The object that OpenAI's GET /v1/batches/{id} answers with, all fields of its type, times in whole Unix seconds.

    Where ours says more or other things: `endpoint` may hold several, comma separated, and is "" until the job is
    planned; `completion_window` is the deadline as a duration such as 24h, or "none". The file ids are there once the
    job has ended, and only of a file that has lines. Beyond OpenAI: results_expire_at, result_bytes, shards_total,
    shards_done, priority, tenant, waiting_for.
    """
    counts, has_ended = job.request_counts, job.status.is_terminal
    ends = [state for state in JobState if state.is_terminal]
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model,
        "errors": _errors(job),
        "input_file_id": job.input_file_id or BatchFile.INPUT.id_of(job.id),
        "completion_window": _window(job),
        "status": job.status.value,
        "output_file_id": BatchFile.OUTPUT.id_of(job.id) if has_ended and counts.completed else None,
        "error_file_id": BatchFile.ERROR.id_of(job.id) if has_ended and counts.failed else None,
        "created_at": int(job.created_at),
        "in_progress_at": _whole(job.in_progress_at),
        "expires_at": _whole(job.expires_at),
        "finalizing_at": _whole(_finalizing_at(job)),
        "cancelling_at": _whole(job.cancelling_at),
        **{f"{end}_at": _whole(job.finished_at) if end is job.status else None for end in ends},
        "request_counts": counts.model_dump(include={"total", "completed", "failed"}),
        "usage": _usage(job),
        "metadata": dict(job.metadata),
        "results_expire_at": _whole(job.results_expire_at),
        "result_bytes": job.result_bytes,
        "shards_total": job.shards_total,
        "shards_done": job.shards_done,
        "priority": job.priority,
        "tenant": job.tenant,
        "waiting_for": list(job.waiting_for),
    }


def _usage(job: JobStatus) -> dict[str, object]:
    usage = job.usage
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _errors(job: JobStatus) -> dict[str, object] | None:
    if not job.errors:
        return None
    return {"object": "list", "data": [error.model_dump() for error in job.errors]}


def _finalizing_at(job: JobStatus) -> float | None:
    """A job completes in the moment of its last record; one that expires is finalised from its deadline on."""
    if job.status is JobState.COMPLETED:
        return job.finished_at
    return job.expires_at if job.status in (JobState.FINALIZING, JobState.EXPIRED) else None


def _window(job: JobStatus) -> str:
    if job.expires_at is None:
        return "none"
    seconds = max(round(job.expires_at - job.created_at), 1)
    unit = next(unit for unit, unit_s in _UNITS_S.items() if seconds % unit_s == 0)
    return f"{seconds // _UNITS_S[unit]}{unit}"


def _whole(unix_s: float | None) -> int | None:
    return None if unix_s is None else int(unix_s)
