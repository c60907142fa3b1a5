"""What to ask Redis about jobs, and what its answers mean."""

from __future__ import annotations

from collections.abc import Sequence

from worker.registry.errors import JobNotFound
from worker.registry.exchange import Command, Exchange
from worker.registry.job_fields import job_status
from worker.registry.keys import Keys
from worker.registry.redis_reply import RedisReply, raw_values, text, text_fields
from worker.registry.result_order import ResultOrder
from worker.registry.result_page import ResultPage
from worker.schemas.job_status import JobStatus
from worker.schemas.worker_info import WorkerInfo

PAGE_RECORDS = 500
# In input order the sizes are known before the records are read: a page is no larger, but for a single record.
PAGE_BYTES = 4 * 1024 * 1024
SCAN_COUNT = 1000


class JobQueries:
    """Each method is an exchange that `perform` or `perform_async` holds with Redis."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

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

    def page(self, job_id: str, cursor: int, order: ResultOrder, limit: int = PAGE_RECORDS) -> Exchange[ResultPage]:
        """The records from `cursor` on: at most `limit`, and in input order those before the first that is missing.

        The cursor is the number of records passed: in input order that is the index of the next line, since every
        line has one record. A job that ended without some (one refused as a whole has none) is read over the gaps.
        Raises JobNotFound, InvalidJobId.
        """
        if order is ResultOrder.INPUT:
            return (yield from self._input_page(job_id, cursor, limit))
        # The state is asked first: a record written before the end is then not missed.
        order_command = ("LRANGE", self._keys.order(job_id), cursor, cursor + limit - 1)
        fields, indices = yield [self._fields_of(job_id), order_command]
        job = _found(job_id, fields)
        records = yield from self._records(job_id, [text(index) for index in indices])
        return ResultPage(records, cursor + len(records), len(records) < limit, job.status.is_terminal)

    def _input_page(self, job_id: str, cursor: int, limit: int) -> Exchange[ResultPage]:
        key = self._keys.records(job_id)
        # Asked for one line first: a reader who waits for it does not ask for hundreds twice a second.
        fields, has_next = yield [self._fields_of(job_id), ("HEXISTS", key, cursor)]
        job = _found(job_id, fields)
        counts, has_ended = job.request_counts, job.status.is_terminal
        if not has_next and (not has_ended or counts.finished == 0 or cursor >= counts.total):
            return ResultPage([], cursor, True, has_ended)
        indices = range(cursor, min(cursor + limit, counts.total))
        lengths: list[int] = yield [("HSTRLEN", key, index) for index in indices]
        if has_ended and counts.finished == counts.total and 0 in lengths:  # the hash expired meanwhile
            raise JobNotFound(job_id)
        wanted, passed = _fitting(lengths, skip_gaps=has_ended)
        records = yield from self._records(job_id, [str(indices[place]) for place in wanted])
        next_cursor = cursor + passed
        is_last = next_cursor >= counts.total or (not has_ended and passed < len(lengths) and not lengths[passed])
        return ResultPage(records, next_cursor, is_last, has_ended)

    def _records(self, job_id: str, indices: Sequence[str]) -> Exchange[list[bytes]]:
        if not indices:
            return []
        [found] = yield [("HMGET", self._keys.records(job_id), *indices)]
        records = [record for record in raw_values(found) if record is not None]
        if len(records) < len(indices):  # the hash expired between the two exchanges
            raise JobNotFound(job_id)
        return records

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


def _fitting(lengths: Sequence[int], *, skip_gaps: bool) -> tuple[list[int], int]:
    """The places of a page's records among these, 0 for one that is missing; how many places the page passes."""
    wanted: list[int] = []
    num_bytes = 0
    for place, length in enumerate(lengths):
        if not length and skip_gaps:
            continue
        if not length or (wanted and num_bytes + length > PAGE_BYTES):
            return wanted, place
        wanted.append(place)
        num_bytes += length
    return wanted, len(lengths)
