"""Request lines of an event loop, for code that runs in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from queue import SimpleQueue
from typing import Self

from worker.intake.line_staging import RequestObject
from worker.intake.submit_abandoned import SubmitAbandoned

Line = bytes | str | RequestObject

CHUNK_LINES = 500  # handed over together: going to the loop and back for every line would cost some 50 us each


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
