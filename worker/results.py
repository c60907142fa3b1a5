"""Polls a job: its records, each once, from a cursor on and while Redis goes back; the lines that have no answer."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import redis

from worker.lines.parse import generated_custom_id
from worker.records.record import has_failed
from worker.registry.errors import LinesForgotten, NothingToRetry, ResultsRewound
from worker.registry.exchange import Exchange, perform
from worker.registry.jobs import JobQueries, ResultOrder, ResultPage
from worker.schemas import JobStatus

CHUNK_INDICES = 20_000  # asked for at once where a cursor is checked: 140 kB
# Without a record in between that was new: the order of the records is broken, and not only older than it was.
MAX_RESTARTS = 8

DUPLICATE = "duplicate_custom_id"

_CURSOR = re.compile(r"([0-9]{1,15})(?:-([0-9a-f]{16}))?")
_64_BITS = (1 << 64) - 1

END_EVERY_S = 1.0  # a job that nobody else ends, by one client, however many in it wait for that

FIRST_POLL_S = 0.02
LONGEST_POLL_S = 0.5

logger = logging.getLogger(__name__)


class LineSet:
    """Indices of a job's lines, a bit each (125 kB for a million), with a digest that no order changes."""

    def __init__(self, indices: Iterable[int] = ()) -> None:
        self._bits = bytearray()
        self._digest = self._count = 0
        for index in indices:
            self.add(index)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, index: int) -> bool:
        return index >> 3 < len(self._bits) and bool(self._bits[index >> 3] & 1 << (index & 7))

    def add(self, index: int) -> bool:
        """Take in an index; False if it was there."""
        if index in self:
            return False
        if index >> 3 >= len(self._bits):
            self._bits.extend(bytes((index >> 3) + 1 - len(self._bits)))
        self._bits[index >> 3] |= 1 << (index & 7)
        self._digest = self._digest + _mixed(index) & _64_BITS
        self._count += 1
        return True

    def copy(self) -> LineSet:
        """Another set of the same indices."""
        other = LineSet()
        other._bits, other._digest, other._count = self._bits[:], self._digest, self._count
        return other

    @property
    def cursor(self) -> ResultCursor:
        """What says that these have been read."""
        return ResultCursor(self._count, self._digest if self._count else None)


def _mixed(index: int) -> int:
    """64 bits of which none follows from few of the index: the end of splitmix64."""
    value = (index + 1) * 0x9E3779B97F4A7C15 & _64_BITS
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _64_BITS
    return value ^ value >> 31


@dataclass(frozen=True, slots=True)
class ResultCursor:
    """How many records have been read and, in completion order, a digest of which: `12-9f3a6c0e12ab34cd`."""

    count: int
    digest: int | None = None  # None: whichever stand first

    @classmethod
    def of(cls, cursor: int | str, order: ResultOrder) -> Self:
        """The cursor that a caller gives. Raises ValueError naming what is accepted."""
        match = _CURSOR.fullmatch(str(cursor)) if type(cursor) in (int, str) else None  # a bool is no number
        if match is None:
            raise ValueError(f"cursor is {cursor!r}; accepted: the number of records read, or a cursor of a reading")
        if match[2] is not None and order is ResultOrder.INPUT:
            raise ValueError(f"cursor is {cursor!r}; accepted in input order: a number, as that order gives it")
        return cls(int(match[1]), None if match[2] is None else int(match[2], 16))

    def __str__(self) -> str:
        return str(self.count) if self.digest is None else f"{self.count}-{self.digest:016x}"


class ResultReader:
    """Reads a job's records from `cursor` on, page by page; see BatchClient.results for cursor, order and follow.

    In completion order it remembers which records it gave, two bits for each line of the job: where Redis has gone
    back (a power cut that took the last second of its file, a failover to a replica that lagged), the records that were
    lost are written again in another order, and those not yet given may stand before the place that was reached.
    """

    def __init__(
        self, queries: JobQueries, job_id: str, cursor: int | str = 0, order: str = "completion", follow: bool = False
    ) -> None:
        self._queries = queries
        self._job_id = job_id
        self._order = ResultOrder.checked(order)
        self._start = ResultCursor.of(cursor, self._order)
        self._follow = follow
        self._pauses = PollPauses()
        self._position = self._start.count  # of the next record: its place in the order, or its line
        self._given = LineSet()  # records of these lines, also to whoever had the cursor before
        self._passed = LineSet()  # those among the places before the position
        self._last: int | None = None  # the last of these
        self._is_checked = self._start.count == 0 or self._order is ResultOrder.INPUT
        self._has_been_over = False
        self._num_restarts = 0  # since the last record that was new
        self._page: ResultPage | None = None
        self._rest: Iterator[bytes] = iter(())  # of the page
        self.num_rewinds = 0  # how often Redis went back under this reading

    @property
    def cursor(self) -> str:
        """Where another reader goes on, after the last record that was taken."""
        if self._order is ResultOrder.INPUT:
            return str(self._position)
        return str(self._given.cursor if self._is_checked else self._start)

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for a job whose deadline has passed: there may be no worker to end it."""
        return self._follow and self._page is not None and self._page.is_overdue and not self._page.records

    def next_page(self) -> Exchange[Iterator[bytes] | None]:
        """The records of the next page, after a pause if the one before was the last so far; None: there is none.

        What the caller left of the page before counts as read. Raises JobNotFound, ResultsLost, ResultsRewound; after
        an error of Redis the same page may be asked for again.
        """
        for _ in self._rest:
            pass
        if self._page is not None and self._page.is_last:
            if self._page.has_ended or not self._follow:
                self._check_complete(self._page)
                return None
            yield self._pauses.next_s()
        if not self._is_checked:
            yield from self._check_cursor()
        self._page = page = yield from self._found_page()
        if page.records:
            self._pauses.restart()
        self._has_been_over = self._has_been_over or page.has_ended
        self._rest = self._taken(page)
        return self._rest

    def _check_cursor(self) -> Exchange[None]:
        """Learn which records a cursor of completion order is about: those that stand first, by its digest."""
        given, indices = LineSet(), [0]
        while len(given) < self._start.count and indices:
            count = min(self._start.count - len(given), CHUNK_INDICES)
            indices = yield from self._queries.written(self._job_id, len(given), count)
            if not all(given.add(index) for index in indices):
                break  # it changed between two chunks
            self._last = indices[-1] if indices else None
        if given.cursor != self._start and (self._start.digest is not None or len(given) < self._start.count):
            yield from self._queries.page(self._job_id, 0, self._order)  # a job that is gone or lost says so itself
            count = self._start.count
            problem = f"its first {count} records are not those of the cursor"
            if self._start.digest is None:  # a number alone may also be a mistake of whoever gave it
                problem = f"it has {len(given)} records, fewer than the cursor {count}, unless that is wrong"
            raise ResultsRewound(self._job_id, problem)
        self._given, self._passed, self._is_checked = given, given.copy(), True

    def _found_page(self) -> Exchange[ResultPage]:
        while True:
            try:
                page = yield from self._queries.page(self._job_id, self._position, self._order, self._last)
            except ResultsRewound:
                self._start_over()
                continue
            is_twice = len(set(page.indices)) < len(page.indices)
            if not is_twice and not any(index in self._passed for index in page.indices):
                return page
            self._start_over()

    def _start_over(self) -> None:
        self.num_rewinds += 1
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            raise ResultsRewound(self._job_id, f"its records changed their order {MAX_RESTARTS} times")
        logger.warning(
            "Redis went back and lost records of job %s that were read: reading its results from the start, without "
            "the %d that were read",
            self._job_id,
            len(self._given),
            extra={"job_id": self._job_id},
        )
        self._position, self._last, self._passed = 0, None, LineSet()

    def _taken(self, page: ResultPage) -> Iterator[bytes]:
        """The records, each of which counts as read once it is taken."""
        if self._order is ResultOrder.INPUT:
            for index, record in zip(page.indices, page.records, strict=True):
                self._position = index + 1
                yield record
            self._position = page.cursor  # behind the gaps of a job that ended without some
            return
        for index, record in zip(page.indices, page.records, strict=True):
            self._passed.add(index)
            self._position, self._last = self._position + 1, index
            if self._given.add(index):
                self._num_restarts = 0
                yield record

    def _check_complete(self, page: ResultPage) -> None:
        """Raise ResultsRewound if what was read is not what an ended job has."""
        num_read = self._position if self._order is ResultOrder.INPUT else len(self._given)
        if page.has_ended and num_read != page.num_places:
            raise ResultsRewound(self._job_id, f"{num_read} records were read, and it has {page.num_places}")
        if self._has_been_over and not page.has_ended:
            raise ResultsRewound(self._job_id, f"{num_read} records were read of a job that had ended, and runs again")


class PollPauses:
    """Pauses between polls: they double from 20 ms to half a second while nothing is new. The caller sleeps."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._pause_s = FIRST_POLL_S

    def next_s(self) -> float:
        """The next pause, no longer than the time that is left."""
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, LONGEST_POLL_S)
        return pause_s if self._until_s is None else min(pause_s, max(self._until_s - time.monotonic(), 0.0))

    def restart(self) -> None:
        """Begin with the shortest again, since something was new."""
        self._pause_s = FIRST_POLL_S

    def check_time(self, job: JobStatus) -> None:
        """Raise TimeoutError, which says how far the job is, if the time is up."""
        if self._until_s is not None and time.monotonic() >= self._until_s:
            raise TimeoutError(
                f"job {job.id} is {job.status} after {self._timeout_s} s: "
                f"{job.request_counts.finished} of {job.request_counts.total} prompts are done"
            )


class EndAttempts:
    """Bounds how often a client tries to end a job whose deadline has passed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried_at_s: dict[str, float] = {}

    def is_due(self, job_id: str) -> bool:
        """Whether it was not tried within END_EVERY_S; then it is tried now."""
        now_s = time.monotonic()
        with self._lock:
            tried = {job: at_s for job, at_s in self._tried_at_s.items() if now_s - at_s < END_EVERY_S}
            self._tried_at_s = {job_id: now_s, **tried}
        return job_id not in tried


class FailedLines:
    """The request lines of a job whose records have no answer, in the order of the lines.

    A line that has no custom_id is given the one of its record, which says where it stood. One that was refused because
    an earlier line has its custom_id is left out: with that line not beside it, it would run, and two answers would
    have one name.
    """

    def __init__(self, client: redis.Redis, queries: JobQueries, job_id: str) -> None:
        self._client = client
        self._queries = queries
        self._job_id = job_id

    def __iter__(self) -> Iterator[bytes]:
        """Raises NothingToRetry, LinesForgotten, JobNotFound, and redis.RedisError when Redis cannot be had."""
        reader = ResultReader(self._queries, self._job_id, order="input")
        num_lines = num_duplicates = 0
        while (page := perform(self._client, reader.next_page())) is not None:
            failed = [record for raw in page if has_failed(record := json.loads(raw))]
            chosen = {_index(record): record["custom_id"] for record in failed if _code(record) != DUPLICATE}
            num_lines += len(chosen)
            num_duplicates += len(failed) - len(chosen)
            if not chosen:
                continue
            lines = perform(self._client, self._queries.lines(self._job_id, list(chosen)))
            for (index, custom_id), line in zip(chosen.items(), lines, strict=True):
                if line is None:
                    raise LinesForgotten(self._job_id)
                yield _named(line, custom_id) if custom_id == generated_custom_id(index) else line
        if num_lines == 0:
            raise NothingToRetry(self._job_id, num_duplicates)


def _index(record: Mapping[str, Any]) -> int:
    return int(record["id"].rpartition("_")[2])


def _code(record: Mapping[str, Any]) -> object:
    response = record["response"]
    return None if response is None else response["body"]["error"]["code"]


def _named(line: bytes, custom_id: str) -> bytes:
    """`line` with this custom_id if it has none; else the line says of itself what it is called."""
    try:
        value = json.loads(line)
    except ValueError:
        return line
    if not isinstance(value, dict) or "custom_id" in value:
        return line
    head, brace, rest = line.partition(b"{")
    comma = b"," if value else b""
    return head + brace + b'"custom_id":"' + custom_id.encode("ascii") + b'"' + comma + rest
