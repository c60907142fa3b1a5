"""Who is there to do the work."""

from __future__ import annotations

from collections.abc import Iterator

import redis
from pydantic import ValidationError

from worker.doctor.finding import Finding
from worker.doctor.level import Level
from worker.registry.exchange import perform
from worker.registry.job_queries import JobQueries
from worker.registry.keys import Keys
from worker.registry.redis_reply import text_fields
from worker.schemas.worker_info import WorkerInfo

_START = "start one: millrace worker --model DIR"


def worker_findings(client: redis.Redis, keys: Keys) -> Iterator[Finding]:
    """Workers with a heartbeat, their versions, and jobs that wait for one. Raises redis.RedisError."""
    waiting = int(text_fields(client.hgetall(keys.admission)).get("jobs", "0"))
    try:
        workers = perform(client, JobQueries(keys).workers())
    except ValidationError:  # a heartbeat with fields that this version does not know, or without those it does
        fix = "run one version everywhere: upgrade this machine or the workers"
        yield Finding("workers", Level.WARNING, "one of another version than this machine's is up", fix)
        return
    if workers:
        yield _alive(workers)
    elif waiting:
        yield Finding("workers", Level.WARNING, f"none is up, and {waiting} jobs wait for one", _START)
    else:
        yield Finding("workers", Level.OK, "none is up, and no job waits")


def _alive(workers: list[WorkerInfo]) -> Finding:
    versions = sorted({worker.version for worker in workers})
    models = sorted({worker.model for worker in workers})
    detail = f"{len(workers)} up, version {', '.join(versions)}, with {', '.join(models)}"
    if len(versions) > 1:
        return Finding("workers", Level.WARNING, detail, "upgrade the older ones: millrace worker of one version")
    return Finding("workers", Level.OK, detail)
