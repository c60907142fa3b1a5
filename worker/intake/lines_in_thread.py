"""Request lines of an event loop, for code that runs in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

from worker.intake.line_staging import RequestObject
from worker.intake.submit_abandoned import SubmitAbandoned

Line = bytes | str | RequestObject

CHUNK_LINES = 500  # asked for together: going to the loop and back for every line would cost some 50 us each


class LinesInThread:
    """Iterates in a thread over lines that may come from the loop; ends with SubmitAbandoned once `abandon` is called.

    An asynchronous iterable runs in the loop, a plain one in the thread.
    """

    def __init__(self, lines: Iterable[Line] | AsyncIterable[Line], loop: asyncio.AbstractEventLoop) -> None:
        self._lines = lines
        self._loop = loop
        self._abandoned = threading.Event()
        self._chunk_task: asyncio.Task[list[Line]] | None = None  # of the loop's thread

    def abandon(self) -> None:
        """Let the thread end before its next line. Called in the loop, any number of times."""
        self._abandoned.set()
        if self._chunk_task is not None:
            self._chunk_task.cancel()

    def __iter__(self) -> Iterator[Line]:
        lines = self._from_loop(self._lines) if isinstance(self._lines, AsyncIterable) else iter(self._lines)
        for line in lines:
            self._check()
            yield line
        self._check()  # once more: half a job is none

    def _from_loop(self, lines: AsyncIterable[Line]) -> Iterator[Line]:
        iterator = aiter(lines)
        while True:
            self._check()
            chunk = asyncio.run_coroutine_threadsafe(self._next_chunk(iterator), self._loop).result()
            yield from chunk
            if len(chunk) < CHUNK_LINES:
                return

    async def _next_chunk(self, iterator: AsyncIterator[Line]) -> list[Line]:
        chunk: list[Line] = []
        self._chunk_task = asyncio.current_task()
        if self._abandoned.is_set():
            return chunk
        async for line in iterator:
            chunk.append(line)
            if len(chunk) == CHUNK_LINES:
                break
        return chunk

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise SubmitAbandoned
