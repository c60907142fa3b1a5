"""What to ask Redis about jobs, and what its answers mean."""

from __future__ import annotations

from collections.abc import Sequence

from worker.registry.errors import JobNotFound
from worker.registry.exchange import Command, Exchange
from worker.registry.job_fields import job_status
from worker.registry.keys import Keys
from worker.registry.query_script import QueryScript
from worker.registry.redis_reply import RedisReply, text, text_fields
from worker.registry.result_order import ResultOrder
from worker.registry.result_page import ResultPage
from worker.schemas.job_status import JobStatus
from worker.schemas.worker_info import WorkerInfo

PAGE_RECORDS = 500
# A page is no larger, but for a single record, which may be of 23 MB (embeddings).
PAGE_BYTES = 4 * 1024 * 1024
SCAN_COUNT = 1000


class JobQueries:
    """Each method is an exchange that `perform` or `perform_async` holds with Redis."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._page = QueryScript("page")

    def status(self, job_id: str) -> Exchange[JobStatus]:
        """The job as it stands. Raises JobNotFound, InvalidJobId."""
        [fields] = yield [self._fields_of(job_id)]
        return _found(job_id, fields)

    def jobs(self, limit: int) -> Exchange[list[JobStatus]]:
        """The newest `limit` jobs that are not forgotten, newest first."""
        # All names at once, at most 10 000 (400 kB): in pages by rank, a job that is dropped on the way, here or by
        # another reader, would move the next ones into a page that was read already.
        [members] = yield [("ZREVRANGE", self._keys.jobs, 0, -1)]
        names = [text(member) for member in members]
        found: list[JobStatus] = []
        for start in range(0, len(names), max(limit, 1)):
            found += yield from self._statuses(names[start : start + limit])
            if len(found) >= limit:
                break
        return found[:limit]

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
        names = sorted(set(names))  # SCAN may name a key twice
        if not names:
            return []
        heartbeats = yield [("HGETALL", f"{prefix}{name}") for name in names]
        return [
            WorkerInfo.model_validate_strings({"id": name, **text_fields(fields)})
            for name, fields in zip(names, heartbeats, strict=True)
            if fields
        ]

    def page(self, job_id: str, cursor: int, order: ResultOrder) -> Exchange[ResultPage]:
        """The records from `cursor` on, within PAGE_RECORDS and PAGE_BYTES: at least one, if there is one.

        The cursor is the number of records passed: in input order that is the index of the next line, since every
        line has one record, and the page ends before the first that is missing. A job that ended without some (one
        refused as a whole has none) is read over the gaps. Raises JobNotFound, InvalidJobId.
        """
        # Told from one instant: the end of a job is not seen before its last records.
        page = yield from self._page(
            [self._keys.job(job_id), self._keys.records(job_id), self._keys.order(job_id)],
            [order.value, cursor, PAGE_RECORDS, PAGE_BYTES],
        )
        if page is None:
            raise JobNotFound(job_id)
        passed, is_last, has_ended, records = page
        return ResultPage(records, cursor + passed, bool(is_last), bool(has_ended))

    def _statuses(self, job_ids: Sequence[str]) -> Exchange[list[JobStatus]]:
        if not job_ids:
            return []
        replies = yield [self._fields_of(job_id) for job_id in job_ids]
        found = dict(zip(job_ids, replies, strict=True))
        forgotten = [job_id for job_id, fields in found.items() if not fields]
        if forgotten:
            yield [("ZREM", self._keys.jobs, *forgotten)]
        return [job_status(job_id, fields) for job_id, fields in found.items() if fields]

    def _fields_of(self, job_id: str) -> Command:
        return ("HGETALL", self._keys.job(job_id))


def _found(job_id: str, fields: RedisReply) -> JobStatus:
    if not fields:
        raise JobNotFound(job_id)
    return job_status(job_id, fields)
