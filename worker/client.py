"""Submits jobs, watches them and reads their results: the producer's side, for threads.

Lines go to Redis in chunks as they are read, so a job of any size needs little memory here.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, Unpack, cast

from pydantic import SecretStr
from redis.exceptions import ResponseError

from settings import LimitSettings, RedisSettings, Settings, TracingSettings
from worker.app import create_app
from worker.broker.messages import Announcer
from worker.lines.files import BOM
from worker.records.record import has_failed
from worker.registry.connect import connect, may_not_write
from worker.registry.errors import FunctionsMissing, JobIncomplete, JobNotFound, JobTooLarge, RedisFull
from worker.registry.exchange import perform
from worker.registry.files import StoredFile
from worker.registry.intake import JobIntake, LineDigest, Staged, checked_options
from worker.registry.jobs import JobControl, JobQueries
from worker.registry.keys import Keys, UnitRef
from worker.registry.leases import UnitLeases
from worker.registry.trust import Trust
from worker.results import EndAttempts, FailedLines, PollPauses, ResultReader
from worker.schemas import ALL_JOBS, JobFilter, JobStatus, SubmitArguments, SubmitOptions, WorkerInfo
from worker.tracing.spans import make_tracing
from worker.unit_closer import UnitCloser

# One exchange with Redis carries at most this.
CHUNK_LINES = 500
CHUNK_BYTES = 1024 * 1024

RequestObject = Mapping[str, Any]  # a line that is still to be written as JSON


class BatchClient:
    """A producer's connection to the queue; usable from several threads, and as a context manager.

    Needs neither torch nor a model. Every method raises redis.RedisError when Redis cannot be had, InvalidJobId for
    what is no job id, and JobNotFound for a job that was never submitted or is forgotten. Making one raises
    SettingsError for a Redis on another machine without a password, unless its settings allow it, and for tracing that
    is on without its packages.
    """

    def __init__(
        self,
        redis: str | RedisSettings,
        *,
        limits: LimitSettings | None = None,
        tracing: TracingSettings | None = None,
    ) -> None:
        redis_settings = RedisSettings(url=SecretStr(redis)) if isinstance(redis, str) else redis
        limits = LimitSettings() if limits is None else limits
        settings = Settings(redis=redis_settings, limits=limits)
        self._keys = keys = Keys()
        self._client = connect(redis_settings)
        self._trust = Trust(self._client, keys, redis_settings)
        self._intake = JobIntake(self._client, keys, settings)
        self._limits = limits
        self._queries = JobQueries(keys)
        self._control = JobControl(self._client, keys)
        self._attempts = EndAttempts()
        owner = f"producer-{uuid.uuid4().hex[:12]}"
        self._closer = UnitCloser(UnitLeases(self._client, keys, owner=owner, settings=settings.worker), limits)
        self._app = create_app(settings)
        self._announcer = Announcer(self._app)
        self._tracing = make_tracing(
            tracing or TracingSettings(), service="millrace-producer", instance=uuid.uuid4().hex[:12]
        )

    def submit(
        self,
        lines: Iterable[bytes | str | RequestObject] | StoredFile,
        *,
        job_id: str | None = None,
        **options: Unpack[SubmitArguments],
    ) -> str:
        """Submit request lines as one job and return its id.

        Each line is raw JSONL, or an object to be written as JSON; blank ones are skipped. They are sent while they
        are read, so a job larger than memory is fine; Redis copies those of an uploaded file itself. Options are the
        fields of SubmitOptions. A second submit of the same lines with the same `job_id` or `idempotency_key` returns
        the first job and leaves it as it is; the lines are read to the end for that.

        Raises EmptyJob, JobTooLarge, JobReused for other lines, endpoint, model or strict than the first job's,
        QueueFull (with retry_after_s), RedisFull, InvalidOption for an option that is unknown or out of range, and
        TypeError for one line in place of several and for a line of another type. A bad line is no error here: its
        record says what is wrong with it. The first submit raises SettingsError for a Redis that may drop jobs (unless
        redis.allow_unsafe) or cannot do as redis.ack says; each NotDurable, with the id of a job that was accepted and
        is not known to have come where redis.ack wants it.
        """
        refuse_single_line(lines)
        checked = checked_options(options)
        self._intake.check(checked)
        job_id = self._keys.new_job_id() if job_id is None else self._keys.check_job_id(job_id)
        self._trust.check()
        accepted_id = self._submit(job_id, lines, checked)
        # Also of a job that was known: the first submit may have broken off before it was durable.
        self._trust.wait_until_durable(accepted_id, "accepted")
        return accepted_id

    def status(self, job_id: str) -> JobStatus:
        """The job as it stands.

        One whose deadline has passed is ended first, as `cancel` does, if no worker is up, or none did within ten
        seconds: prompts that nobody runs get their batch_expired records. That is tried once a second at most.
        """
        look = perform(self._client, self._queries.look(job_id))
        if look.is_abandoned and self._attempts.is_due(job_id):
            try:
                return self._ended(job_id, self._control.unheld_units(job_id))
            except FunctionsMissing:
                pass
            except ResponseError as error:
                if not may_not_write(error):
                    raise
        return look.status  # also to whoever may only read, or reads from a replica

    def jobs(self, limit: int = 1000, matching: JobFilter = ALL_JOBS, after: str | None = None) -> list[JobStatus]:
        """The newest jobs that match, newest first; with `after` those older than that job. Raises JobNotFound then."""
        return perform(self._client, self._queries.jobs(limit, matching, after))

    def find(self, name: str) -> str:
        """The id of the job that `name` means: an id, what one id alone begins with, or `latest`.

        Raises AmbiguousJob where several begin so; a whole id is not looked up.
        """
        return perform(self._client, self._queries.find(name))

    def workers(self) -> list[WorkerInfo]:
        """The workers that are there."""
        return perform(self._client, self._queries.workers())

    def results(
        self,
        job_id: str,
        cursor: int | str = 0,
        follow: bool = False,
        *,
        order: Literal["completion", "input"] = "completion",
    ) -> Results:
        """A job's records, errors among them: as they were written, or in the order of its lines.

        `cursor`: leave out the records before it. It is what `cursor` of an earlier reading said, or the number of
        records read, in the same order. With `follow`, waits for more until the job has ended; without, ends where
        nothing is written yet, which in input order is before the first line that is not done. Memory does not grow
        with the job, but for two bits a line in completion order.

        No record comes twice or is left out, even if Redis goes back to an earlier state meanwhile: then a warning is
        logged, and `num_rewinds` of what is returned rises. What cannot be made good is an error of the reading,
        ResultsRewound: of a cursor that was kept while Redis went back, or where a number as a cursor left out others.
        Records that Redis has evicted are ResultsLost.

        Raises ValueError for an unknown order or cursor; reading raises what every method does, and may be gone on with
        after a redis.RedisError.
        """
        return Results(self.pages(job_id, cursor, follow, order=order))

    def pages(
        self,
        job_id: str,
        cursor: int | str = 0,
        follow: bool = False,
        *,
        order: Literal["completion", "input"] = "completion",
    ) -> ResultPages:
        """`results`, as many records together as one answer of Redis holds: none where nothing was new.

        With `follow` such an empty one comes after each pause, of half a second at most: a caller that has more to do
        than to wait, such as showing progress, does it then. Records of a page that are not taken before the next one
        count as read.
        """
        reader = ResultReader(self._queries, job_id, cursor, order, follow)
        return ResultPages(reader, partial(self._next_page, reader, job_id))

    def errors(self, job_id: str) -> Iterator[dict[str, Any]]:
        """The records, so far, of requests without an answer."""
        return (record for record in self.results(job_id) if has_failed(record))

    def cancel(self, job_id: str) -> JobStatus:
        """Cancel a job; one that has ended is left as it is. Finished records stay.

        Prompts nobody runs get their batch_cancelled records before this returns, the others within about a second. A
        job of which nothing was left to cancel completes. Raises NotDurable for a job that was cancelled and is not
        known to be where redis.ack wants that.
        """
        self._trust.check_ack()
        job = self._ended(job_id, self._control.cancel(job_id))
        self._trust.wait_until_durable(job_id, "cancelled")
        return job

    def retry(self, job_id: str, **options: Unpack[SubmitArguments]) -> str:
        """Submit the lines of an ended job that have no answer as a new job and return its id; see FailedLines.

        Its options are those of the first job, but for what is given here; its deadline is as long as that one's was.
        Raises JobNotEnded, NothingToRetry, LinesForgotten (the lines are kept as long as the job's records), and what
        `submit` raises.
        """
        known = perform(self._client, self._queries.options(job_id))
        checked = checked_options({**known, **options})
        arguments = cast("SubmitArguments", checked.model_dump(exclude_unset=True))
        return self.submit(FailedLines(self._client, self._queries, job_id), **arguments)

    def delete(self, job_id: str) -> None:
        """Forget an ended job with its records and lines, before its time. Raises JobNotEnded."""
        self._control.delete(job_id)

    def wait(self, job_id: str, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job has ended. Raises TimeoutError after `timeout_s` seconds."""
        pauses = PollPauses(timeout_s)
        while not (job := self.status(job_id)).status.is_terminal:
            pauses.check_time(job)
            time.sleep(pauses.next_s())
        return job

    def close(self) -> None:
        """Close the connections. Spans that wait are sent first, within 2 s."""
        self._tracing.close()
        self._app.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _ended(self, job_id: str, units: Iterable[UnitRef]) -> JobStatus:
        """The job once those of its units that nobody runs are closed."""
        for ref in units:
            self._closer.close_unclaimed(ref)
        return perform(self._client, self._queries.status(job_id))

    def _next_page(self, reader: ResultReader, job_id: str) -> Iterator[dict[str, Any]] | None:
        records = perform(self._client, reader.next_page())
        if reader.is_stuck:
            self.status(job_id)  # which ends it if nobody else does
        return None if records is None else map(json.loads, records)

    def _submit(
        self, job_id: str, lines: Iterable[bytes | str | RequestObject] | StoredFile, options: SubmitOptions
    ) -> str:
        staging = LineStaging(self._intake, self._limits, job_id, options)
        if staging.is_accepted:
            return self._submit_staged(staging, lines, options)
        with self._tracing.submit(job_id, options) as traceparent:
            options = options.model_copy(update={"traceparent": traceparent or None})
            return self._submit_staged(staging, lines, options)

    def _submit_staged(
        self, staging: LineStaging, lines: Iterable[bytes | str | RequestObject] | StoredFile, options: SubmitOptions
    ) -> str:
        with staging:
            staged = staging.copy(lines) if isinstance(lines, StoredFile) else staging.stage(lines)
            num_lines = lines.num_lines if isinstance(lines, StoredFile) else staging.num_lines
            accepted_id, should_announce = self._intake.submit(staging.job_id, num_lines, options, staged)
        if should_announce:
            self._announcer.announce(UnitRef.plan(accepted_id), options.priority)
        return accepted_id


class ResultPages(Iterator[Iterator[dict[str, Any]]]):
    """The pages of `BatchClient.pages`."""

    def __init__(self, reader: ResultReader, read: Callable[[], Iterator[dict[str, Any]] | None]) -> None:
        """`read` gives the reader's next page, None at the end."""
        self._reader = reader
        self._read = read

    @property
    def cursor(self) -> str:
        """With this another reader, of this process or a later one, goes on after the last record that was taken."""
        return self._reader.cursor

    @property
    def num_rewinds(self) -> int:
        """How often Redis was found to have lost records that were read: each time, reading began again from the start
        with those left out."""
        return self._reader.num_rewinds

    def __next__(self) -> Iterator[dict[str, Any]]:
        page = self._read()
        if page is None:
            raise StopIteration
        return page


class Results(Iterator[dict[str, Any]]):
    """The records of `BatchClient.results`."""

    def __init__(self, pages: ResultPages) -> None:
        self._pages = pages
        self._page: Iterator[dict[str, Any]] = iter(())

    @property
    def cursor(self) -> str:
        """See ResultPages.cursor."""
        return self._pages.cursor

    @property
    def num_rewinds(self) -> int:
        """See ResultPages.num_rewinds."""
        return self._pages.num_rewinds

    def __next__(self) -> dict[str, Any]:
        while True:
            for record in self._page:
                return record
            self._page = next(self._pages)


class LineStaging:
    """Sends a job's lines in chunks while they are read: what is held in memory does not grow with the job.

    Leaving the `with` by any error, also of the iterable or on Ctrl-C, forgets what was staged: half a job is of no
    use. Redis would forget it after redis.staging_ttl_s anyway.
    """

    def __init__(self, intake: JobIntake, limits: LimitSettings, job_id: str, options: SubmitOptions) -> None:
        self._intake = intake
        self._limits = limits
        self.job_id = job_id
        self._options = options
        self._accepted_as = self._known_by_key()  # a job whose lines are only compared with these
        self._nonce = secrets.token_hex(8)
        self._digest = LineDigest()

    @property
    def is_accepted(self) -> bool:
        """Whether its job, or that of its idempotency key, is known to be accepted."""
        return self._accepted_as is not None

    @property
    def num_lines(self) -> int:
        """How many have been read."""
        return self._digest.num_lines

    def stage(self, lines: Iterable[bytes | str | RequestObject]) -> Staged:
        """Stage the lines of a new job, or read those of one that is accepted already; returns which they are.

        Raises JobTooLarge, RedisFull, and TypeError for what is no line.
        """
        for chunk in self._chunks(lines):
            if self._accepted_as is None:
                self._stage(chunk)
            self._digest.add(chunk)
        return self._digest.staged(self._nonce)

    def copy(self, file: StoredFile) -> Staged:
        """Have the lines of an uploaded file staged. Raises RedisFull, FileUnknown."""
        if self._accepted_as is None:
            self._intake.copy(self.job_id, file.id, self._nonce)
        return Staged(self._nonce, file.num_line_bytes, file.digest)

    def _stage(self, chunk: Sequence[bytes]) -> None:
        try:
            if not self._intake.stage(self.job_id, self.num_lines, chunk, self._nonce):
                self._accepted_as = self.job_id
        except RedisFull:
            self._accepted_as = self._known_by_key()  # perhaps it is full of this very job, which another submitted
            if self._accepted_as is None:
                raise

    def _known_by_key(self) -> str | None:
        key = self._options.idempotency_key
        return None if key is None else self._intake.find(self._options.tenant, key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            return
        self._intake.discard(self.job_id, self._nonce)
        if isinstance(error, JobIncomplete) and self._accepted_as is not None:  # and so they were not staged
            raise JobNotFound(self._accepted_as) from error  # it was deleted meanwhile

    def _chunks(self, lines: Iterable[bytes | str | RequestObject]) -> Iterator[list[bytes]]:
        chunk: list[bytes] = []
        chunk_bytes = num_bytes = 0
        for num_lines, line in enumerate(self._raw(lines), 1):
            num_bytes += len(line)
            if num_lines > self._limits.max_prompts_per_job:
                raise JobTooLarge("prompts", num_lines, self._limits.max_prompts_per_job, is_whole=False)
            if num_bytes > self._limits.max_job_bytes:
                raise JobTooLarge("job_bytes", num_bytes, self._limits.max_job_bytes, is_whole=False)
            if chunk and (len(chunk) == CHUNK_LINES or chunk_bytes + len(line) > CHUNK_BYTES):
                yield chunk
                chunk, chunk_bytes = [], 0
            chunk.append(line)
            chunk_bytes += len(line)
        if chunk:
            yield chunk

    def _raw(self, lines: Iterable[bytes | str | RequestObject]) -> Iterator[bytes]:
        max_bytes = self._limits.max_prompt_bytes
        for number, line in enumerate(lines, 1):
            raw = _encoded(line, number)
            if number == 1:
                raw = raw.removeprefix(BOM)  # of an open file
            # A blank line that is too long may have been cut, see read_raw_lines.
            if raw.strip() or len(raw) > max_bytes:
                # A line one byte too long is refused like one that is a gigabyte too long.
                yield raw[: max_bytes + 1]


def _encoded(line: object, number: int) -> bytes:
    if isinstance(line, Mapping):
        # ASCII: a lone surrogate travels as its escape, and the worker's parser says what is wrong with it.
        return json.dumps(dict(line), ensure_ascii=True).encode("ascii")
    if isinstance(line, str):
        return line.encode("utf-8", "surrogatepass").rstrip(b"\r\n")
    if isinstance(line, (bytes, bytearray, memoryview)):
        return bytes(line).rstrip(b"\r\n")
    raise TypeError(f"line {number} is of type {type(line).__name__}; accepted: bytes, str, a mapping")


def refuse_single_line(lines: object) -> None:
    """Raise TypeError for one line in place of several: iterating over it gives characters or keys."""
    if isinstance(lines, (str, bytes, bytearray, memoryview, Mapping)):
        raise TypeError(
            f"lines is one {type(lines).__name__}; accepted: an iterable of lines (bytes, str or mappings), "
            "such as [line] or an open file"
        )
