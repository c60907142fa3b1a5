"""What the registry refuses, by type.

RegistryError
|-- InvalidJobId       not a job id of this registry
|   `-- AmbiguousJob   what several ids begin with
|-- JobNotFound        never submitted, deleted, or forgotten after its time
|-- JobNotEnded        what is asked for can be done only with a job that has ended
|-- LinesForgotten     the request lines of a job that has ended are not there any more
|-- ResultsLost        records of a job are gone before their time: Redis evicted or lost them
|-- ResultsRewound     what was read of a job are not the records that it has: Redis went back in between
|-- InvalidSubmission  the options or lines of a job that can never be accepted
|   |-- InvalidOption  an option that does not exist, or whose value is not accepted
|   |-- EmptyJob       no lines
|   |-- NothingToRetry no line without an answer
|   |-- JobTooLarge    more prompts or bytes than one job may have
|   |-- JobIncomplete  lines are missing from the staged input
|   |-- LinesChanged   other bytes are there than were staged
|   `-- JobReused      the job of this id or idempotency key has other lines
|-- FileUnknown        no such uploaded file of this tenant
|-- FileReused         the file of this idempotency key has other lines
|-- FileChanged        lines of an upload are gone before it was whole
|-- TooManyFiles       the tenant has as many files, or bytes of files, as it may
|-- KeyUnknown         no such key of `millrace serve`
|-- QueueFull          there is no room now: try again after retry_after_s
|-- RedisFull          Redis has no memory left; a redis.RedisError too
|-- FunctionsMissing   Redis lacks the functions of this version, and this user may not load them
`-- NotDurable         a job was accepted or cancelled, and it is not known whether that survives (redis.ack)
"""

from __future__ import annotations

from collections.abc import Sequence

from redis.exceptions import OutOfMemoryError

_NOUN = {"prompts": "prompts", "job_bytes": "bytes"}
_SETTING = {"prompts": "limits.max_prompts_per_job", "job_bytes": "limits.max_job_bytes"}
LOAD_FUNCTIONS = "`millrace acl --functions | redis-cli -x FUNCTION LOAD REPLACE`"


class RegistryError(Exception):
    """Base of all refusals of the registry. An unreachable Redis raises redis.RedisError instead."""

    code: str = "invalid_request"  # of BatchError, for a producer that is told by the job's status


class InvalidJobId(RegistryError):
    """Not a job id of this registry."""


class AmbiguousJob(InvalidJobId):
    """Several ids begin so."""

    def __init__(self, beginning: str, job_ids: Sequence[str]) -> None:
        first, second = job_ids[:2]
        super().__init__(f"job is {beginning}; accepted: more of its id, since {first} and {second} begin so")
        self.beginning = beginning


class JobNotFound(RegistryError):
    """There is no such job."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"no job {job_id}: it was never submitted, or its results have expired (redis.result_ttl_s)")
        self.job_id = job_id


class JobNotEnded(RegistryError):
    """The job still runs, or waits to."""

    def __init__(self, job_id: str, state: str) -> None:
        super().__init__(f"job {job_id} is {state}; accepted: a job that has ended (`millrace cancel` ends one)")
        self.job_id = job_id
        self.state = state


class LinesForgotten(RegistryError):
    """Lines of a job that has ended are missing: workers of a version that drops them all at its end finished it."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the lines of job {job_id} that failed were not kept; submit them from their file")
        self.job_id = job_id


class ResultsLost(RegistryError):
    """Records that a job counts, or their order, are gone before their time: Redis evicted or lost them."""

    def __init__(self, job_id: str, num_records: int, num_left: int, num_ordered: int) -> None:
        super().__init__(
            f"results of job {job_id} are lost: of {num_records} records {num_left} are left, and {num_ordered} places "
            "of their order (redis maxmemory-policy must be noeviction); submit its file again"
        )
        self.job_id = job_id
        self.num_records = num_records
        self.num_left = num_left


class ResultsRewound(RegistryError):
    """What was read of a job are not the records that it has: Redis went back to an earlier state in between."""

    def __init__(self, job_id: str, problem: str) -> None:
        super().__init__(
            f"job {job_id}: {problem}: Redis has lost records since they were read, and they were written again; read "
            "all results once more, from cursor 0 (each has its `id`, by which it is told from those you have)"
        )
        self.job_id = job_id


class InvalidSubmission(RegistryError):
    """A job that can never be accepted as it stands."""


class InvalidOption(InvalidSubmission, ValueError):
    """An option of a job that does not exist, or whose value is not accepted."""

    def __init__(self, name: str, problem: str, *, accepted: str) -> None:
        super().__init__(f"{name} {problem}; accepted: {accepted}")
        self.name = name  # of a pair of metadata: metadata.<key>
        self.accepted = accepted


class EmptyJob(InvalidSubmission):
    """A job without lines."""

    code = "empty_file"

    def __init__(self) -> None:
        super().__init__("the job has no lines; accepted: at least 1")


class NothingToRetry(InvalidSubmission):
    """A job whose lines all have an answer, or have the custom_id of an earlier line, or have no record."""

    def __init__(self, job_id: str, num_duplicates: int) -> None:
        but = f" but {num_duplicates} whose custom_id an earlier line has" if num_duplicates else ""
        accepted = "a job with records of failed lines (one that was refused as a whole has none: submit its file)"
        super().__init__(f"no line of job {job_id} has failed{but}; accepted: {accepted}")
        self.job_id = job_id
        self.num_duplicates = num_duplicates


class JobTooLarge(InvalidSubmission):
    """One job may not have that many prompts or bytes."""

    def __init__(self, resource: str, value: int, limit: int, *, is_whole: bool = True) -> None:
        """`is_whole`: `value` is the whole job's; False: what had been read of it when it was refused."""
        size = f"{value:,} {_NOUN[resource]}{'' if is_whole else ' or more'}"
        mend = f"raise {_SETTING[resource]}, here and at the workers, or submit the job in parts"
        super().__init__(f"the job has {size}, limit {limit:,}: {mend}")
        self.code = "too_many_tasks" if resource == "prompts" else "file_too_large"
        self.resource = resource  # prompts or job_bytes
        self.value = value
        self.limit = limit


class JobIncomplete(InvalidSubmission):
    """Lines are missing from the staged input."""

    def __init__(self, expected: int, staged: int, first_missing: int) -> None:
        super().__init__(
            f"the job should have {expected} lines, {staged} are staged; line with index {first_missing} is missing"
        )
        self.expected = expected
        self.staged = staged
        self.first_missing = first_missing


class LinesChanged(InvalidSubmission):
    """What Redis holds of a job's lines is not what was staged."""

    def __init__(self, num_bytes: int, staged_bytes: int) -> None:
        super().__init__(
            f"the job's lines have {num_bytes} bytes, {staged_bytes} were staged: Redis went back in time, or somebody "
            "wrote there; submit it again",
        )


class JobReused(InvalidSubmission):
    """A job was submitted before under this id or idempotency key, with other lines or options."""

    def __init__(self, job_id: str, other: str, idempotency_key: str | None) -> None:
        """`other`: what that job has otherwise, comma separated: lines, endpoint, model, strict."""
        name, mend = f"job {job_id} has", "a new job_id"
        if idempotency_key is not None:
            name, mend = f"idempotency_key {idempotency_key!r} is of job {job_id}, which has", "another key"
        super().__init__(f"{name} other {other}; accepted: the same again, or {mend}")
        self.job_id = job_id
        self.other = other
        self.idempotency_key = idempotency_key  # None: it was submitted under its id


class FileUnknown(RegistryError):
    """There is no such file of this tenant."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"no file {file_id[:80]}: it was never uploaded, was deleted, or has expired")
        self.file_id = file_id


class FileReused(RegistryError):
    """A file was uploaded before under this idempotency key, with other lines."""

    def __init__(self, file_id: str, idempotency_key: str | None) -> None:
        super().__init__(
            f"idempotency key {idempotency_key!r} is of {file_id}, which has other lines; accepted: the same again, or "
            "another key"
        )
        self.file_id = file_id


class FileChanged(RegistryError):
    """What Redis holds of an upload is not what was sent."""

    def __init__(self, num_lines: int, num_staged: int) -> None:
        super().__init__(
            f"the file has {num_lines} lines, {num_staged} are staged: Redis went back in time, or the upload took "
            "longer than redis.staging_ttl_s between two parts; upload it again"
        )


class TooManyFiles(RegistryError):
    """There is no room for another file of this tenant."""

    def __init__(self, resource: str, used: int, limit: int) -> None:
        setting = "serve.max_tenant_files" if resource == "files" else "serve.max_tenant_file_bytes"
        super().__init__(f"the tenant's files have {used} {resource}, limit {limit} ({setting}): delete some first")
        self.resource = resource  # files or bytes
        self.used = used
        self.limit = limit


class KeyUnknown(RegistryError):
    """There is no such key."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"no key {key_id!r}; accepted: an id that `millrace keys list` shows")
        self.key_id = key_id


class CallbackUnknown(RegistryError):
    """There is no such callback: it was sent, dropped or forgotten, or there never was."""

    def __init__(self, event_id: str) -> None:
        super().__init__(f"no callback {event_id[:80]!r}; accepted: an id that `millrace callbacks list` shows")
        self.event_id = event_id


class RedisFull(RegistryError, OutOfMemoryError):
    """Redis has no memory left for a job: its maxmemory is reached."""

    def __init__(self) -> None:
        super().__init__(
            "Redis is full (OOM: it uses more than its maxmemory), nothing was submitted; delete jobs whose results "
            "are read (`millrace delete JOB`), wait until results expire (redis.result_ttl_s), or raise maxmemory"
        )


class QueueFull(RegistryError):
    """There is no room for the job now."""

    code = "queue_full"

    def __init__(self, *, scope: str, resource: str, used: int, asked: int, limit: int, retry_after_s: float) -> None:
        again = f"try again in {retry_after_s:.0f} s"
        if resource == "result_bytes":
            told = f"results of the tenant have {used} bytes, limit {limit} (limits.max_tenant_result_bytes): delete "
            told += f"jobs whose results are read (`millrace delete JOB`), or {again}"
        else:
            told = f"no room for {asked} more {resource} ({scope}): {used} of {limit} are open; {again}"
        super().__init__(told)
        self.scope = scope  # "all" or "tenant"
        self.resource = resource  # prompts, bytes, jobs, or a tenant's result_bytes
        self.used = used
        self.asked = asked
        self.limit = limit
        self.retry_after_s = retry_after_s


class FunctionsMissing(RegistryError):
    """Redis has not been given the functions of this version, and this user may give it neither them nor scripts."""

    def __init__(self, library: str) -> None:
        super().__init__(
            f"Redis lacks the functions of this version ({library}), and this user may not load them: start a worker "
            f"of this version, or run as an administrator {LOAD_FUNCTIONS}"
        )


class NotDurable(RegistryError):
    """Redis did what it was asked and did not confirm in time that it is where `redis.ack` wants it."""

    def __init__(self, job_id: str, done: str, ack: str, timeout_s: float) -> None:
        where = {"disk": "is on Redis's disk", "replica": "is on a replica"}[ack]
        super().__init__(
            f"job {job_id} is {done}, but not known to be durable: Redis did not confirm within {timeout_s:g} s that "
            f"it {where} (redis.ack={ack})"
        )
        self.job_id = job_id
        self.ack = ack
