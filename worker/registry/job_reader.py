"""What the registry knows of jobs."""

from __future__ import annotations

import json
from typing import cast

import redis

from worker.registry.errors import JobNotFound
from worker.registry.keys import Keys
from worker.registry.redis_reply import raw_values, text, text_fields
from worker.schemas.job_state import JobState
from worker.schemas.job_status import JobStatus
from worker.schemas.job_usage import JobUsage
from worker.schemas.request_counts import RequestCounts
from worker.schemas.worker_info import WorkerInfo

_STATES = {
    "queued": JobState.VALIDATING,
    "running": JobState.IN_PROGRESS,
    "done": JobState.COMPLETED,
    "cancelled": JobState.CANCELLED,
    "expired": JobState.EXPIRED,
    "failed": JobState.FAILED,
    "refused": JobState.FAILED,
}


class JobReader:
    """Reads jobs and their records. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    def status(self, job_id: str) -> JobStatus:
        """The job as it stands. Raises JobNotFound, InvalidJobId."""
        fields = self._client.hgetall(self._keys.job(job_id))
        if not fields:
            raise JobNotFound(job_id)
        return _status(job_id, text_fields(fields))

    def jobs(self, limit: int) -> list[JobStatus]:
        """The newest `limit` jobs that are not forgotten, newest first."""
        # All names at once, at most 10 000 (400 kB): in pages by rank, a job that is dropped on the way, here or by
        # another reader, would move the next ones into a page that was read already. Without scores: names only.
        reply = cast("list[bytes]", self._client.zrange(self._keys.jobs, 0, -1, desc=True))
        names = [text(member) for member in reply]
        found: list[JobStatus] = []
        for start in range(0, len(names), max(limit, 1)):
            found += self._statuses(names[start : start + limit])
            if len(found) >= limit:
                break
        return found[:limit]

    def records(self, job_id: str, cursor: int, limit: int) -> list[bytes]:
        """The records written after the first `cursor`, at most `limit`, in the order they were written."""
        indices = self._client.lrange(self._keys.order(job_id), cursor, cursor + limit - 1)
        if not indices:
            return []
        found = raw_values(self._client.hmget(self._keys.records(job_id), [text(index) for index in indices]))
        records = [record for record in found if record is not None]
        if len(records) < len(found):  # the hash expired between the two calls
            raise JobNotFound(job_id)
        return records

    def workers(self) -> list[WorkerInfo]:
        """Workers whose heartbeat is fresh."""
        workers: list[WorkerInfo] = []
        for key in self._client.scan_iter(match=f"{self._keys.workers}*", count=1000):
            fields = self._client.hgetall(key)
            if fields:
                name = text(key)[len(self._keys.workers) :]
                workers.append(WorkerInfo.model_validate_strings({"id": name, **text_fields(fields)}))
        return sorted(workers, key=lambda worker: worker.id)

    def _statuses(self, job_ids: list[str]) -> list[JobStatus]:
        with self._client.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hgetall(self._keys.job(job_id))
            replies = pipeline.execute()
        statuses = []
        for job_id, fields in zip(job_ids, replies, strict=True):
            if fields:
                statuses.append(_status(job_id, text_fields(fields)))
            else:
                self._client.zrem(self._keys.jobs, job_id)
        return statuses


def _status(job_id: str, job: dict[str, str]) -> JobStatus:
    state = _STATES[job["st"]]
    if state in (JobState.VALIDATING, JobState.IN_PROGRESS) and job["cancel"] != "0":
        state = JobState.CANCELLING
    finished_at = _seconds(job["fin"])
    prompt_tokens, output_tokens = int(job["tokp"]), int(job["toko"])
    return JobStatus(
        id=job_id,
        status=state,
        created_at=int(job["created"]) / 1000,
        in_progress_at=_seconds(job["started"]),
        expires_at=_seconds(job["deadline"]),
        cancelling_at=_seconds(job["cancel"]),
        finished_at=finished_at,
        results_expire_at=None if finished_at is None else finished_at + int(job["retain"]) / 1000,
        request_counts=RequestCounts(total=int(job["n"]), completed=int(job["ok"]), failed=int(job["err"])),
        usage=JobUsage(
            input_tokens=prompt_tokens,
            cached_tokens=int(job["tokc"]),
            output_tokens=output_tokens,
            resumed_tokens=int(job.get("tokr", 0)),
            total_tokens=prompt_tokens + output_tokens,
        ),
        shards_total=int(job["ns"]),
        shards_done=int(job["sd"]),
        priority=int(job["pri"]),
        tenant=job["tenant"],
        metadata=json.loads(job["spec"]).get("metadata", {}),
        error=job["reason"] or None,
    )


def _seconds(milliseconds: str) -> float | None:
    return None if milliseconds == "0" else int(milliseconds) / 1000
