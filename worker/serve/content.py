"""Streams files out: uploaded ones, and a job's records as OpenAI's output and error files, also while it runs.

A page of Redis is held at a time, and read when the client has taken the one before.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from redis.asyncio import Redis as AsyncRedis
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from worker.records.record import BatchFile
from worker.registry.exchange import perform_async
from worker.registry.files import FileStore, StoredFile
from worker.registry.jobs import JobQueries
from worker.results import ResultReader
from worker.schemas import JobStatus
from worker.serve.answers import error_response
from worker.serve.errors import ApiError

MEDIA_TYPE = "application/jsonl"

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


class Content(Protocol):
    """Lines that can be read from the start any number of times, and are the same each time."""

    @property
    def num_lines(self) -> int:
        """How many there are now."""
        ...

    @property
    def is_growing(self) -> bool:
        """Whether more lines will come."""
        ...

    @property
    def known_bytes(self) -> int | None:
        """What num_bytes gives, where it is known without reading the lines."""
        ...

    async def num_bytes(self) -> int:
        """Of these lines with their ends."""
        ...

    def read(self, start: int) -> AsyncIterator[bytes]:
        """Them from byte `start` on, in parts of some MiB at most."""
        ...


class FileContent:
    """The lines of an uploaded file."""

    is_growing = False

    def __init__(self, client: AsyncRedis, store: FileStore, file: StoredFile) -> None:
        self._client = client
        self._store = store
        self._file = file

    @property
    def num_lines(self) -> int:
        """See Content."""
        return self._file.num_lines

    @property
    def known_bytes(self) -> int:
        """See Content."""
        return self._file.num_bytes

    async def num_bytes(self) -> int:
        """See Content."""
        return self._file.num_bytes

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """See Content. Raises FileUnknown when the file is deleted meanwhile."""
        index, place = 0, 0  # of a line and its first byte
        while sizes := await perform_async(self._client, self._store.sizes(self._file, index)):
            for part in self._store.parts(index, sizes):
                num_bytes = sum(size + 1 for size in sizes[part.start - index : part.stop - index])
                if place + num_bytes > start:
                    lines = await perform_async(self._client, self._store.lines(self._file, part))
                    yield b"".join([line + b"\n" for line in lines])[max(start - place, 0) :]
                place += num_bytes
            index += len(sizes)


class RecordContent:
    """A job's records with an answer, or those without: those there were when this was made, as they came."""

    def __init__(self, client: AsyncRedis, queries: JobQueries, job: JobStatus, kind: BatchFile) -> None:
        counts = job.request_counts
        self._client = client
        self._queries = queries
        self._job = job
        self._kind = kind
        self.num_lines = counts.completed if kind is BatchFile.OUTPUT else counts.failed
        self.is_growing = not job.status.is_terminal

    @property
    def known_bytes(self) -> int | None:
        """See Content. That of all records is known."""
        if self.num_lines == self._job.request_counts.finished and self._job.result_bytes:
            return self._job.result_bytes + self.num_lines
        return None

    async def num_bytes(self) -> int:
        """See Content. Reads all records unless they all belong to this file."""
        known = self.known_bytes
        return known if known is not None else sum([len(part) async for part in self.read(0)])

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """See Content. Raises ResultsLost, ResultsRewound, JobNotFound."""
        reader = ResultReader(self._queries, self._job.id)
        place = num_read = 0
        while num_read < self.num_lines:
            records = await perform_async(self._client, reader.next_page())
            if records is None:
                return
            lines = [record + b"\n" for record in records if BatchFile.of_raw(record) is self._kind]
            lines = lines[: self.num_lines - num_read]
            num_read += len(lines)
            part = b"".join(lines)
            if place + len(part) > start:
                yield part[max(start - place, 0) :]
            place += len(part)


class Download(StreamingResponse):
    """A content on its way, which gives up its place when it is through, however it ends."""

    place: AbstractContextManager[object] = nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self.place:
            await super().__call__(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Bytes start .. stop - 1 of a content."""

    start: int
    stop: int


async def content_response(request: Request, content: Content, etag: str) -> Response:
    """The content, or the range of it that is asked for (one range of bytes; several are answered with all of it).

    `etag`: of a content that does not grow. While it grows, X-Incomplete is true and X-Last-Line says how many lines
    there are so far. A range behind the end is refused.
    """
    headers = {
        "X-Incomplete": "true" if content.is_growing else "false",
        "X-Last-Line": str(content.num_lines),
        "Accept-Ranges": "bytes",
    }
    if not content.is_growing:
        headers["ETag"] = f'"{etag}"'
    if request.method == "HEAD":  # which has no ranges
        return _head(headers, content.known_bytes)
    wanted = _RANGE.fullmatch(request.headers.get("range", ""))
    if wanted is None or not (wanted[1] or wanted[2]) or not _is_same(request, headers.get("ETag")):
        return await _streamed(content.read(0), 200, headers)
    num_bytes = await content.num_bytes()
    part = _slice(wanted[1], wanted[2], num_bytes)
    if part is None:
        refused = error_response(ApiError(f"the range lies behind the end, byte {num_bytes}", status=416))
        refused.headers["Content-Range"] = f"bytes */{num_bytes}"
        return refused
    total = "*" if content.is_growing else str(num_bytes)
    headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{total}"
    headers["Content-Length"] = str(part.stop - part.start)
    return await _streamed(_cut(content.read(part.start), part.stop - part.start), 206, headers)


def _head(headers: dict[str, str], num_bytes: int | None) -> Response:
    response = Response(headers=headers, media_type=MEDIA_TYPE)
    if num_bytes is None:
        del response.headers["Content-Length"]  # which is that of no body
    else:
        response.headers["Content-Length"] = str(num_bytes)
    return response


def _is_same(request: Request, etag: str | None) -> bool:
    """Whether the client, if it says what it has the beginning of, has it of this content."""
    known = request.headers.get("if-range")
    return known is None or known == etag


def _slice(first: str, last: str, num_bytes: int) -> _Slice | None:
    """The part that a range names; None if there is no byte in it."""
    if not first:  # so many at the end
        start, stop = max(num_bytes - int(last), 0), num_bytes
    else:
        start, stop = int(first), min(int(last) + 1, num_bytes) if last else num_bytes
    return _Slice(start, stop) if start < stop else None


async def _cut(parts: AsyncIterator[bytes], num_bytes: int) -> AsyncIterator[bytes]:
    async for part in parts:
        yield part[:num_bytes]
        num_bytes -= len(part)
        if num_bytes <= 0:
            return


async def _streamed(parts: AsyncIterator[bytes], status: int, headers: dict[str, str]) -> Response:
    """The response, whose first part is read before its status is sent: what is lost is an error, not a cut answer."""
    first = await anext(parts, b"")

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for part in parts:
            yield part

    return Download(body(), status, headers, MEDIA_TYPE)
