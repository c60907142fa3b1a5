"""Asks Redis about jobs and workers and for pages of a job's records, cancels and deletes jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import redis

from worker.registry.errors import AmbiguousJob, JobNotEnded, JobNotFound, ResultsLost, ResultsRewound
from worker.registry.exchange import Exchange, Untyped, ask, ask_one, raw_values, text, text_fields
from worker.registry.keys import Keys, UnitRef
from worker.registry.lua import Scripts
from worker.registry.models import ServedModels
from worker.schemas import (
    ALL_JOBS,
    BatchError,
    EngineLoad,
    JobFilter,
    JobState,
    JobStatus,
    JobUsage,
    RequestCounts,
    WorkerInfo,
)

PAGE_RECORDS = 500
# A page is no larger, but for a single record, which may be of 23 MB (embeddings).
PAGE_BYTES = 4 * 1024 * 1024
PAGE_JOBS = 100  # looked at together where few may match
SCAN_COUNT = 1000

LATEST = "latest"  # in place of a job's id: the newest

_OPEN_SHARDS = "m:"  # what the field of a model's open shards begins with
_FAILED = "e:"  # likewise of the prompts that failed by a code

# Workers look for expired units every worker.reap_interval_s; one that is up but hangs leaves them to whoever looks.
WORKER_LATE_S = 10.0


class ResultOrder(StrEnum):
    """Accepted by `results` of the clients and by `millrace results --order`."""

    COMPLETION = "completion"  # as they were written
    INPUT = "input"  # as the request lines stood

    @classmethod
    def checked(cls, order: str) -> Self:
        """`order`. Raises ValueError naming what is accepted."""
        if order not in tuple(cls):
            raise ValueError(f"order is {order!r}; accepted: {', '.join(cls)}")
        return cls(order)


@dataclass(frozen=True, slots=True)
class ResultPage:
    """Some records of a job, and where to read on."""

    records: Sequence[bytes]
    indices: Sequence[int]  # the lines they are of
    cursor: int  # of the next page, see JobQueries.page
    num_places: int  # where the cursor ends, as far as the job has come
    is_last: bool  # every record so far is read
    has_ended: bool  # the job was over when this was asked: no more will come
    is_overdue: bool  # it was not, though its deadline had passed


@dataclass(frozen=True, slots=True)
class JobLook:
    """A job as it stands, and whether somebody has to end it."""

    status: JobStatus
    is_abandoned: bool  # its deadline has passed, and no worker is up that writes what its prompts get then, or is late


class JobQueries:
    """Each method is an exchange that `perform` or `perform_async` holds with Redis."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def status(self, job_id: str) -> Exchange[JobStatus]:
        """The job as it stands. Raises JobNotFound, InvalidJobId."""
        look = yield from self.look(job_id)
        return look.status

    def look(self, job_id: str) -> Exchange[JobLook]:
        """The job as it stands, and whether it is abandoned. Raises JobNotFound, InvalidJobId."""
        fields, *answers = yield [("HGETALL", self._keys.job(job_id)), *ServedModels.questions(self._keys)]
        if not fields:
            raise JobNotFound(job_id)
        served, (now_s, _) = ServedModels.of_answers(answers), answers[-1]
        job = job_status(job_id, fields, served)
        if job.status.is_terminal or job.expires_at is None:
            return JobLook(job, is_abandoned=False)
        overdue_s = int(now_s) - job.expires_at
        return JobLook(job, is_abandoned=overdue_s >= (WORKER_LATE_S if served.is_any_served else 0.0))

    def jobs(self, limit: int, matching: JobFilter = ALL_JOBS, after: str | None = None) -> Exchange[list[JobStatus]]:
        """The newest `limit` jobs that match and are not forgotten, newest first; older ones than `after`.

        Raises JobNotFound if that is not in the list of jobs any more.
        """
        # All names at once, at most 10 000 (400 kB): in pages by rank, a job that is dropped on the way, here or by
        # another reader, would move the next ones into a page that was read already.
        listed = self._keys.jobs_of(matching.tenant)
        [members] = yield [("ZREVRANGE", listed, 0, -1)]
        names = [text(member) for member in members]
        if after is not None:
            if after not in names:
                raise JobNotFound(after)
            names = names[names.index(after) + 1 :]
        found: list[JobStatus] = []
        step = limit if matching == JobFilter(tenant=matching.tenant) else max(limit, PAGE_JOBS)
        for start in range(0, len(names), max(step, 1)):
            jobs = yield from self._statuses(names[start : start + step], listed)
            found += filter(matching.matches, jobs)
            if len(found) >= limit:
                break
        return found[:limit]

    def find(self, name: str) -> Exchange[str]:
        """The id of the job that `name` means, see BatchClient.find.

        Raises InvalidJobId for what no id begins with, JobNotFound, AmbiguousJob.
        """
        if name != LATEST and self._keys.is_job_id(name):
            return self._keys.check_job_id(name)
        beginning = "" if name == LATEST else self._keys.job_beginning(name)
        [members] = yield [("ZREVRANGE", self._keys.jobs, 0, -1)]
        names = [job_id for member in members if (job_id := text(member)).startswith(beginning)]
        found: list[JobStatus] = []
        for start in range(0, len(names), PAGE_JOBS):
            found += yield from self._statuses(
                names[start : start + PAGE_JOBS], self._keys.jobs
            )  # some may be forgotten
            if len(found) > 1 or (found and name == LATEST):
                break
        if not found:
            raise JobNotFound(name)
        if len(found) > 1 and name != LATEST:
            raise AmbiguousJob(name, [job.id for job in found])
        return found[0].id

    def known(self, tenant: str, idempotency_key: str) -> Exchange[str | None]:
        """The job submitted earlier under a producer's own key."""
        [job_id] = yield [("GET", self._keys.idempotency(tenant, idempotency_key))]
        return None if job_id is None else text(job_id)

    def workers(self) -> Exchange[list[WorkerInfo]]:
        """Workers whose heartbeat is fresh."""
        prefix = self._keys.workers
        names: list[str] = []
        cursor: int | str = "0"
        while True:
            [(cursor, keys)] = yield [("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", SCAN_COUNT)]
            names += [text(key).removeprefix(prefix) for key in keys]
            if int(cursor) == 0:
                break
        return (yield from self._fresh(sorted(set(names))))  # SCAN may name a key twice

    def serving_workers(self) -> Exchange[list[WorkerInfo]]:
        """`workers` without those that still load their model; asks no SCAN, which goes through all keys of Redis."""
        [names] = yield [("HKEYS", self._keys.served)]
        return (yield from self._fresh(sorted(map(text, names))))

    def _fresh(self, names: Sequence[str]) -> Exchange[list[WorkerInfo]]:
        if not names:
            return []
        prefix = self._keys.workers
        heartbeats = yield [("HGETALL", f"{prefix}{name}") for name in names]
        engines = yield [("GET", f"{self._keys.engines}{name}") for name in names]
        return [
            WorkerInfo.model_validate_strings({"id": name, **text_fields(fields)}).model_copy(
                update={"engine": None if engine is None else EngineLoad.model_validate_json(engine)}
            )
            for name, fields, engine in zip(names, heartbeats, engines, strict=True)
            if fields
        ]

    def page(self, job_id: str, cursor: int, order: ResultOrder, last: int | None = None) -> Exchange[ResultPage]:
        """The records from `cursor` on, within PAGE_RECORDS and PAGE_BYTES: at least one, if there is one.

        The cursor is the number of records passed: in input order that is the index of the next line, since every
        line has one record, and the page ends before the first that is missing. A job that ended without some (one
        refused as a whole has none) is read over the gaps. Raises JobNotFound, ResultsLost, InvalidJobId, and
        ResultsRewound where the record before the cursor is not that of line `last` (completion order; None: not
        looked at).
        """
        # All of one moment: the end of a job is not seen before its last records.
        call = Scripts.PAGE(
            self._keys.of_unit_scripts(UnitRef.plan(job_id)),
            order=order.value,
            cursor=cursor,
            last="" if last is None else last,
            max_records=PAGE_RECORDS,
            max_bytes=PAGE_BYTES,
        )
        [answer] = yield [call]
        if answer is None:
            raise JobNotFound(job_id)
        word, *page = answer
        if text(word) == "rewound":
            raise ResultsRewound(job_id, f"its record {cursor} is not the one that was read")
        if text(word) == "lost":
            raise ResultsLost(job_id, *page)
        passed, is_last, has_ended, num_places, is_overdue, indices, records = page
        return ResultPage(
            records, [int(index) for index in indices], cursor + passed, num_places,
            is_last=bool(is_last), has_ended=bool(has_ended), is_overdue=bool(is_overdue),
        )  # fmt: skip

    def written(self, job_id: str, start: int, count: int) -> Exchange[list[int]]:
        """The lines of `count` records from the one at `start` on, in the order they were written."""
        [indices] = yield [("LRANGE", self._keys.order(job_id), start, start + count - 1)]
        return [int(index) for index in indices]

    def options(self, job_id: str) -> Exchange[dict[str, object]]:
        """The options that an ended job was submitted with, as SubmitOptions names them, without what is the job's own.

        Its deadline is as long as it was. Raises JobNotFound, JobNotEnded, InvalidJobId.
        """
        job = yield from self.status(job_id)
        if not job.status.is_terminal:
            raise JobNotEnded(job_id, job.status.value)
        [(endpoint, strict, spec, on_done)] = yield [("HMGET", self._keys.job(job_id), "url", "strict", "spec", "cb")]
        return {
            "priority": job.priority,
            "deadline_s": None if job.expires_at is None else round(job.expires_at - job.created_at, 3),
            "tenant": job.tenant,
            "metadata": dict(job.metadata),
            "endpoint": text(endpoint or b"") or None,
            "model": job.model,  # also if no line named it: those that failed are for the one that answered the others
            "strict": strict == b"1",
            "on_done": None if on_done is None else text(on_done),
            "result_ttl_s": json.loads(text(spec)).get("result_ttl_s"),
        }

    def lines(self, job_id: str, indices: Sequence[int]) -> Exchange[list[bytes | None]]:
        """These request lines, None for those that are not there: a line goes once it has its answer."""
        [values] = yield [("HMGET", self._keys.lines(job_id), *indices)]
        return raw_values(values)

    def _statuses(self, job_ids: Sequence[str], listed: str) -> Exchange[list[JobStatus]]:
        """Those that are not forgotten; the others are dropped from the list in `listed`."""
        if not job_ids:
            return []
        questions = ServedModels.questions(self._keys)
        replies = yield [*questions, *(("HGETALL", self._keys.job(job_id)) for job_id in job_ids)]
        served = ServedModels.of_answers(replies[: len(questions)])
        found = dict(zip(job_ids, replies[len(questions) :], strict=True))
        forgotten = [job_id for job_id, fields in found.items() if not fields]
        if forgotten:
            yield [("ZREM", listed, *forgotten)]
        return [job_status(job_id, fields, served) for job_id, fields in found.items() if fields]


class JobControl:
    """Cancels and deletes jobs. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    def cancel(self, job_id: str) -> list[UnitRef]:
        """Mark the job cancelled; returns the units it may still have, none if it is over. Raises JobNotFound."""
        plan = UnitRef.plan(job_id)
        keys = self._keys.of_unit_scripts(plan)
        # A job that Redis has lost the plan of has nothing else to close.
        calls = [Scripts.MEND(keys, job_id=job_id), Scripts.CANCEL(keys, job_id=job_id)]
        _, (status, num_shards) = ask(self._client, calls)
        if text(status) == "gone":
            raise JobNotFound(job_id)
        return [] if text(status) == "terminal" else _units(plan, num_shards)

    def unheld_units(self, job_id: str) -> list[UnitRef]:
        """The units of an open job that nobody has a lease on; none of one that is over or forgotten."""
        plan = UnitRef.plan(job_id)
        mend = Scripts.MEND(self._keys.of_unit_scripts(plan), job_id=job_id)
        job = ("HMGET", self._keys.job(job_id), "st", "ns")
        sizes = [("HLEN", key) for key in (self._keys.lines(job_id), self._keys.records(job_id))]
        _, (state, num_shards), num_unanswered, num_records = ask(self._client, [mend, job, *sizes])
        is_over = state is None or JobState.in_redis(text(state)).is_terminal
        # No more than cancel.lua counts, since a producer may write any number into the job.
        most = 3 * (num_unanswered + num_records)
        return [] if is_over else self._unheld(_units(plan, min(int(num_shards), most)))

    def _unheld(self, units: Sequence[UnitRef]) -> list[UnitRef]:
        (seconds, micros), *rows = ask(
            self._client, [("TIME",), *(("HMGET", self._keys.unit(ref), "st", "lease", "term") for ref in units)]
        )
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        # As claim.lua has it: a lease that ends later than its length from now is over too.
        return [
            ref
            for ref, (state, lease, term) in zip(units, rows, strict=True)
            if state is not None and (text(state) == "queued" or not now_ms < int(lease) <= now_ms + int(term or lease))
        ]

    def delete(self, job_id: str) -> None:
        """Forget a job that has ended and all that Redis holds of it. Raises JobNotFound, JobNotEnded."""
        call = Scripts.DELETE(self._keys.of_unit_scripts(UnitRef.plan(job_id)), job_id=job_id)
        state = ask_one(self._client, call)
        if state is None:
            raise JobNotFound(job_id)
        if not JobState.in_redis(text(state)).is_terminal:
            raise JobNotEnded(job_id, JobState.in_redis(text(state)).value)


def _units(plan: UnitRef, num_shards: int) -> list[UnitRef]:
    return [plan, *(UnitRef.shard(plan.job_id, number) for number in range(num_shards))]


def job_status(job_id: str, fields: Mapping[Untyped, Untyped], served: ServedModels) -> JobStatus:
    """The job as it stands, read from its hash while these models are served."""
    job = text_fields(fields)
    finished_at = _seconds(job["fin"])
    prompt_tokens, output_tokens = int(job["tokp"]), int(job["toko"])
    spec = json.loads(job["spec"])
    return JobStatus(
        id=job_id,
        status=_state(job),
        endpoint=job.get("url") or job.get("urls", ""),
        model=job.get("model") or job.get("pin") or None,
        waiting_for=_waiting_for(job, served),
        created_at=int(job["created"]) / 1000,
        in_progress_at=_seconds(job["started"]),
        expires_at=_seconds(job["deadline"]),
        cancelling_at=_seconds(job["cancel"]),
        finished_at=finished_at,
        results_expire_at=None if finished_at is None else finished_at + int(job["retain"]) / 1000,
        request_counts=_counts(job),
        usage=JobUsage(
            input_tokens=prompt_tokens,
            cached_tokens=int(job["tokc"]),
            output_tokens=output_tokens,
            resumed_tokens=int(job.get("tokr", 0)),
            reasoning_tokens=int(job.get("tokt", 0)),
            total_tokens=prompt_tokens + output_tokens,
        ),
        result_bytes=int(job.get("resb", 0)),
        shards_total=int(job["ns"]),
        shards_done=int(job["sd"]),
        priority=int(job["pri"]),
        tenant=job["tenant"],
        metadata=spec.get("metadata", {}),
        input_file_id=spec.get("input_file_id"),
        failures=_failures(job),
        error=job["reason"] or None,
        errors=_errors(job),
    )


def _waiting_for(job: Mapping[str, str], served: ServedModels) -> tuple[str, ...]:
    if JobState.in_redis(job["st"]).is_terminal:
        return ()
    models = [field.removeprefix(_OPEN_SHARDS) for field in job if field.startswith(_OPEN_SHARDS)]
    pin = job.get("pin")
    if pin and job["started"] == "0":
        models = [served.resolve(pin) or pin]
    return tuple(sorted(model for model in models if not served.is_served(model)))


def _failures(job: Mapping[str, str]) -> dict[str, int]:
    found = [(name.removeprefix(_FAILED), int(count)) for name, count in job.items() if name.startswith(_FAILED)]
    return dict(sorted(found, key=lambda entry: (-entry[1], entry[0])))


def _counts(job: Mapping[str, str]) -> RequestCounts:
    return RequestCounts(
        total=int(job["n"]),
        completed=int(job["ok"]),
        failed=int(job["err"]),
        cancelled=int(job.get("can", 0)),
        expired=int(job["exp"]),
    )


def _state(job: Mapping[str, str]) -> JobState:
    state = JobState.in_redis(job["st"])
    if state.is_terminal:
        return state
    if job["cancel"] != "0":
        return JobState.CANCELLING
    # One record says batch_expired: the deadline has passed, and the other records are on their way.
    return JobState.FINALIZING if job["exp"] != "0" else state


def _errors(job: Mapping[str, str]) -> tuple[BatchError, ...]:
    if "errors" in job:
        return tuple(BatchError.model_validate(error) for error in json.loads(job["errors"]))
    return (BatchError(code="batch_failed", message=job["reason"]),) if job["reason"] else ()


def _seconds(milliseconds: str) -> float | None:
    return None if milliseconds == "0" else int(milliseconds) / 1000
