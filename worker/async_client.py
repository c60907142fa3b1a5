"""Submits jobs, watches them and reads their results: the producer's side, in an event loop.

Reads go straight to Redis; what is long, such as a submit, runs `BatchClient` in a thread that is fed from the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, Self, TypeVar, Unpack

from pydantic import SecretStr

from settings import LimitSettings, RedisSettings, TracingSettings
from worker.client import BatchClient, RequestObject, refuse_single_line
from worker.records.record import has_failed
from worker.registry.connect import connect_async
from worker.registry.exchange import perform_async
from worker.registry.files import StoredFile
from worker.registry.jobs import JobQueries
from worker.registry.keys import Keys
from worker.results import EndAttempts, PollPauses, ResultReader
from worker.schemas import ALL_JOBS, JobFilter, JobStatus, SubmitArguments, WorkerInfo

T = TypeVar("T")

MAX_SUBMITS = 32  # at once, each in a thread of its own
MAX_CANCELS = 8  # likewise: one of 50,000 prompts takes seconds, and others should not wait for it

Line = bytes | str | RequestObject

CHUNK_LINES = 500  # handed over together: going to the loop and back for every line would cost some 50 us each


class AsyncBatchClient:
    """BatchClient for asyncio: its verbs, arguments and errors. For one event loop, the one it is first used in.

    Only `pages` is not there: another task can show progress while one waits.

    Looking and waiting take no thread, so that one loop may follow any number of jobs. `submit` and `cancel`, which
    send several scripts and a Celery message, run BatchClient's in threads of this client's own, never in those of
    asyncio.to_thread, which the lines may need. 32 submits run at once (MAX_SUBMITS), further ones wait their turn: the
    thread of a cancelled task goes on until it notices. Cancels have 8 threads (MAX_CANCELS) that no submit can take.
    """

    def __init__(
        self,
        redis: str | RedisSettings,
        *,
        limits: LimitSettings | None = None,
        tracing: TracingSettings | None = None,
    ) -> None:
        settings = RedisSettings(url=SecretStr(redis)) if isinstance(redis, str) else redis
        self._blocking = BatchClient(settings, limits=limits, tracing=tracing)  # connects when first used
        self._client = connect_async(settings)
        self._queries = JobQueries(Keys())
        self._attempts = EndAttempts()
        self._submits = ThreadPoolExecutor(MAX_SUBMITS, thread_name_prefix="millrace-submit")
        self._cancels = ThreadPoolExecutor(MAX_CANCELS, thread_name_prefix="millrace-cancel")

    async def submit(
        self,
        lines: Iterable[bytes | str | RequestObject] | AsyncIterable[bytes | str | RequestObject] | StoredFile,
        *,
        job_id: str | None = None,
        **options: Unpack[SubmitArguments],
    ) -> str:
        """Submit request lines as one job and return its id, see BatchClient.submit.

        An asynchronous iterable runs in the loop, in one task, and a generator is closed however the submit ends; a
        plain one runs in a thread. A task that is cancelled while the lines are read submits nothing; later than that
        the job may have been accepted, and a submit with the same `job_id` or `idempotency_key` finds it.
        """
        if isinstance(lines, StoredFile):
            return await _run_in(self._submits, partial(self._blocking.submit, lines, job_id=job_id, **options))
        refuse_single_line(lines)
        async with LinesInThread(lines) as source:
            return await _run_in(self._submits, partial(self._blocking.submit, source, job_id=job_id, **options))

    async def status(self, job_id: str) -> JobStatus:
        """The job as it stands, see BatchClient.status."""
        look = await perform_async(self._client, self._queries.look(job_id))
        if not (look.is_abandoned and self._attempts.is_due(job_id)):
            return look.status
        return await _run_in(self._cancels, partial(self._blocking.status, job_id))

    async def jobs(
        self, limit: int = 1000, matching: JobFilter = ALL_JOBS, after: str | None = None
    ) -> list[JobStatus]:
        """The newest jobs that match, newest first, see BatchClient.jobs."""
        return await perform_async(self._client, self._queries.jobs(limit, matching, after))

    async def find(self, name: str) -> str:
        """The id of the job that `name` means, see BatchClient.find."""
        return await perform_async(self._client, self._queries.find(name))

    async def workers(self) -> list[WorkerInfo]:
        """The workers that are there."""
        return await perform_async(self._client, self._queries.workers())

    def results(
        self,
        job_id: str,
        cursor: int | str = 0,
        follow: bool = False,
        *,
        order: Literal["completion", "input"] = "completion",
    ) -> AsyncResults:
        """A job's records, to be read with `async for`; see BatchClient.results for cursor, follow and order."""
        reader = ResultReader(self._queries, job_id, cursor, order, follow)
        return AsyncResults(reader, partial(self._next_page, reader, job_id))

    async def errors(self, job_id: str) -> AsyncIterator[dict[str, Any]]:
        """The records, so far, of requests without an answer."""
        async for record in self.results(job_id):
            if has_failed(record):
                yield record

    async def cancel(self, job_id: str) -> JobStatus:
        """Cancel a job, see BatchClient.cancel."""
        return await _run_in(self._cancels, partial(self._blocking.cancel, job_id))

    async def retry(self, job_id: str, **options: Unpack[SubmitArguments]) -> str:
        """Submit what an ended job left without an answer as a new job, see BatchClient.retry."""
        return await _run_in(self._submits, partial(self._blocking.retry, job_id, **options))

    async def delete(self, job_id: str) -> None:
        """Forget an ended job before its time, see BatchClient.delete."""
        await _run_in(self._cancels, partial(self._blocking.delete, job_id))

    async def wait(self, job_id: str, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job has ended. Raises TimeoutError after `timeout_s` seconds."""
        pauses = PollPauses(timeout_s)
        while not (job := await self.status(job_id)).status.is_terminal:
            pauses.check_time(job)
            await asyncio.sleep(pauses.next_s())
        return job

    async def _next_page(self, reader: ResultReader, job_id: str) -> Iterator[bytes] | None:
        records = await perform_async(self._client, reader.next_page())
        if reader.is_stuck:
            await self.status(job_id)  # which ends it if nobody else does
        return records

    async def close(self) -> None:
        """Wait for the threads of submits and cancels that still run, then close the connections."""
        for executor in (self._submits, self._cancels):
            await asyncio.to_thread(executor.shutdown)
        await asyncio.to_thread(self._blocking.close)
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class AsyncResults(AsyncIterator[dict[str, Any]]):
    """The records of `AsyncBatchClient.results`."""

    def __init__(self, reader: ResultReader, read: Callable[[], Awaitable[Iterator[bytes] | None]]) -> None:
        """`read` gives the reader's next page, None at the end."""
        self._reader = reader
        self._read = read
        self._page: Iterator[bytes] = iter(())

    @property
    def cursor(self) -> str:
        """With this another reader, of this process or a later one, goes on after the last record that was taken."""
        return self._reader.cursor

    @property
    def num_rewinds(self) -> int:
        """How often Redis was found to have lost records that were read, see BatchClient.results."""
        return self._reader.num_rewinds

    async def __anext__(self) -> dict[str, Any]:
        while True:
            for raw in self._page:
                record: dict[str, Any] = json.loads(raw)
                return record
            page = await self._read()
            if page is None:
                raise StopAsyncIteration
            self._page = page


async def _run_in(executor: Executor, call: Callable[[], T]) -> T:
    context = contextvars.copy_context()  # as asyncio.to_thread does
    return await asyncio.get_running_loop().run_in_executor(executor, context.run, call)


class LinesInThread:
    """Iterates in a thread over lines that may come from the loop, inside an `async with` of the loop.

    An asynchronous iterable runs in the loop, in one task from its first line to its end, so that it may hold cancel
    scopes open across lines; a plain one runs in the thread. Leaving the `async with` lets the thread end with
    SubmitAbandoned before its next line, and closes an asynchronous generator that has not ended.
    """

    def __init__(self, lines: Iterable[Line] | AsyncIterable[Line]) -> None:
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._abandoned = threading.Event()
        self._wanted = asyncio.Semaphore(0)  # chunks the thread has asked for: no line is read before it is wanted
        self._chunks: SimpleQueue[list[Line] | BaseException | None] = SimpleQueue()  # None: the end
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if isinstance(self._lines, AsyncIterable):
            self._reading = asyncio.create_task(self._read(self._lines))
            self._reading.add_done_callback(self._hand_over_end)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._abandoned.set()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def __iter__(self) -> Iterator[Line]:
        for line in self._lines_of_loop() if isinstance(self._lines, AsyncIterable) else self._lines:
            self._check()
            yield line
        self._check()  # once more: half a job is none

    def _lines_of_loop(self) -> Iterator[Line]:
        while True:
            self._loop.call_soon_threadsafe(self._wanted.release)
            chunk = self._chunks.get()
            self._check()
            if chunk is None:
                return
            if isinstance(chunk, BaseException):
                raise chunk
            yield from chunk

    async def _read(self, lines: AsyncIterable[Line]) -> None:
        iterator = aiter(lines)
        try:
            await self._wanted.acquire()
            chunk: list[Line] = []
            async for line in iterator:
                self._check()  # a generator may have caught its cancellation
                chunk.append(line)
                if len(chunk) == CHUNK_LINES:
                    self._chunks.put(chunk)
                    chunk = []
                    await self._wanted.acquire()
            self._chunks.put(chunk)
        finally:
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()

    def _hand_over_end(self, reading: asyncio.Task[None]) -> None:
        self._chunks.put(asyncio.CancelledError() if reading.cancelled() else reading.exception())

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise SubmitAbandoned


class SubmitAbandoned(Exception):
    """Nobody waits for the job any more: the task that submits it was cancelled."""
