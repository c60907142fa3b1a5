"""Takes uploads: each line goes to Redis as it comes, and nothing is kept here but a part of the file."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress

import redis
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MAX_BOUNDARY_LENGTH, MultipartParser, parse_options_header
from redis.asyncio import Redis as AsyncRedis
from starlette.requests import Request

from settings import LimitSettings, ServeSettings, Settings
from worker.client import CHUNK_BYTES, CHUNK_LINES
from worker.lines.files import GZIP_MAGIC, HEAD_BYTES, LineSplitter, other_format
from worker.registry.errors import EmptyJob, JobTooLarge
from worker.registry.exchange import perform_async
from worker.registry.files import FileRoom, FileStore, NewFile, StoredFile
from worker.registry.intake import LineDigest
from worker.registry.keys import Keys
from worker.serve.access import Slots
from worker.serve.answers import body_parts, whole_number
from worker.serve.errors import ApiError
from worker.serve.metrics import RequestCounts

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
FILE_FIELD = "file"
MAX_FIELD_BYTES = 256
MAX_FILENAME = 255
# Of expires_after, as OpenAI has it: an hour to 30 days.
LEAST_TTL_S, MOST_TTL_S = 3_600, 2_592_000
MAX_FORM_BYTES = 64 * 1024  # beside the lines: fields, headers, boundaries
MAX_IDEMPOTENCY_KEY = 256


class UploadForm:
    """Takes a form (multipart/form-data) apart as it comes: its fields are kept, the file's lines are handed on."""

    def __init__(self, boundary: bytes, max_line_bytes: int, accepted: Sequence[str] = FIELDS) -> None:
        """`accepted`: names of the fields beside the file."""
        self._accepted = accepted
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )
        self._splitter = LineSplitter(max_line_bytes)
        self._max_line_bytes = max_line_bytes
        self._lines: list[bytes] = []  # that have come since they were last taken
        self._num_lines = 0  # of the file so far
        self._head = bytearray()  # of the file
        self._headers: dict[bytes, bytes] = {}  # of the part that comes
        self._header, self._value = bytearray(), bytearray()
        self._name = ""
        self._is_whole = False
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None  # None: no file has come

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in the next part of the body. Raises ApiError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(f"the body is no multipart/form-data: {error}") from error
        lines, self._lines = self._lines, []
        return lines

    def check_whole(self) -> None:
        """Raise ApiError unless the form has come to its end, with a file in it."""
        if not self._is_whole:
            raise ApiError("the body ends before the form does")
        if self.filename is None:
            raise ApiError("no file was sent", param=FILE_FIELD, code="missing_required_parameter")

    def _on_part_begin(self) -> None:
        self._headers, self._name = {}, ""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not self._name:
            raise ApiError("a part of the form has no name")
        if self._name == FILE_FIELD:
            self._begin_file(options.get(b"filename"))
        elif self._name not in self._accepted:
            raise ApiError(
                f"unknown field {self._name[:64]!r}; accepted: {FILE_FIELD}, {', '.join(self._accepted)}",
                param=self._name[:64],
                code="unknown_parameter",
            )
        elif self._name in self.fields:
            raise ApiError(f"{self._name} is given twice", param=self._name)
        else:
            self.fields[self._name] = b""

    def _begin_file(self, filename: bytes | None) -> None:
        if self.filename is not None:
            raise ApiError("two files are sent; accepted: one", param=FILE_FIELD)
        name = (filename or b"").decode("utf-8", "replace")
        if not 0 < len(name) <= MAX_FILENAME:
            raise ApiError(
                f"the file's name has {len(name)} characters; accepted: 1 to {MAX_FILENAME}", param=FILE_FIELD
            )
        self.filename = name

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = data[start:end]
        if self._name != FILE_FIELD:
            self.fields[self._name] += part
            if len(self.fields[self._name]) > MAX_FIELD_BYTES:
                raise ApiError(f"{self._name} has more than {MAX_FIELD_BYTES} bytes", param=self._name)
            return
        if len(self._head) < HEAD_BYTES:
            self._head += part[: HEAD_BYTES - len(self._head)]
            if len(self._head) == HEAD_BYTES:
                self._check_format()
        self._take(self._splitter.feed(part))

    def _on_part_end(self) -> None:
        if self._name == FILE_FIELD:
            self._check_format()  # of a short file
            self._take(self._splitter.end())

    def _take(self, lines: Iterable[bytes]) -> None:
        """Raise ApiError for a line that is too long: cut, as the splitter gives it, it would be another request."""
        for line in lines:
            self._num_lines += 1
            if len(line) > self._max_line_bytes:
                problem = f"line {self._num_lines} (blank ones not counted) has more than {self._max_line_bytes} bytes"
                raise ApiError(f"{problem} (limits.max_prompt_bytes)", param=FILE_FIELD, code="line_too_long")
            self._lines.append(line)

    def _on_end(self) -> None:
        self._is_whole = True

    def _check_format(self) -> None:
        head = bytes(self._head)
        what = "it is compressed with gzip; accepted: plain request lines (JSONL)" if head[:2] == GZIP_MAGIC else None
        what = what or other_format(head)
        if what is not None:
            raise ApiError(f"the file cannot be read: {what}", param=FILE_FIELD, code="invalid_file_format")


class _StagedLines:
    """Sends the lines of one upload to Redis, in parts of at most CHUNK_BYTES."""

    def __init__(self, client: AsyncRedis, store: FileStore, limits: LimitSettings, file: NewFile) -> None:
        self._client = client
        self._store = store
        self._limits = limits
        self._room: FileRoom | None = None
        self._file = file
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.digest = LineDigest()

    async def look_for_room(self) -> None:
        """Find out how much the tenant may add. Raises TooManyFiles where it has all that it may."""
        self._room = await perform_async(self._client, self._store.room(self._file))

    async def add(self, lines: Iterable[bytes]) -> None:
        """Take the next lines. Raises JobTooLarge, TooManyFiles."""
        for line in lines:
            if len(self._waiting) == CHUNK_LINES or self._waiting_bytes + len(line) > CHUNK_BYTES:
                await self.send()
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._check_size()

    def _check_size(self) -> None:
        num_lines = self.digest.num_lines + len(self._waiting)
        num_bytes = self.digest.num_bytes + self._waiting_bytes
        if num_lines > self._limits.max_prompts_per_job:
            raise JobTooLarge("prompts", num_lines, self._limits.max_prompts_per_job, is_whole=False)
        if num_bytes > self._limits.max_job_bytes:
            raise JobTooLarge("job_bytes", num_bytes, self._limits.max_job_bytes, is_whole=False)
        if self._room is not None:
            self._room.check(num_bytes)

    async def send(self) -> None:
        """Send what waits."""
        if not self._waiting:
            return
        await perform_async(self._client, self._store.stage(self._file, self.digest.num_lines, self._waiting))
        self.digest.add(self._waiting)
        self._waiting, self._waiting_bytes = [], 0


class Uploads:
    """Takes files in, a bounded number at once."""

    def __init__(
        self, client: AsyncRedis, keys: Keys, store: FileStore, settings: Settings, counts: RequestCounts
    ) -> None:
        self._client = client
        self._keys = keys
        self._store = store
        self._limits: LimitSettings = settings.limits
        self._serve: ServeSettings = settings.serve
        self._counts = counts
        self._slots = Slots("uploads", settings.serve.max_uploads)

    async def take(self, request: Request, tenant: str) -> StoredFile:
        """The file that the request brings. Raises ApiError and what the registry refuses; then nothing is kept."""
        file, _ = await self.take_form(request, tenant, FIELDS)
        return file

    async def take_form(
        self, request: Request, tenant: str, accepted: Sequence[str]
    ) -> tuple[StoredFile, Mapping[str, bytes]]:
        """`take` of a form that may have these fields; and what it has of them."""
        boundary = _boundary(request)
        key = idempotency_key(request)
        file = NewFile(self._keys.new_file_id(tenant, key), secrets.token_hex(8), tenant, key)
        form = UploadForm(boundary, self._limits.max_prompt_bytes, accepted)
        with self._slots.taken(tenant):
            return await self._take(request, form, file), form.fields

    async def _take(self, request: Request, form: UploadForm, file: NewFile) -> StoredFile:
        self._counts.open_uploads += 1
        try:
            return await self._stage_and_keep(request, form, file)
        except BaseException:
            # Also of a task that is cancelled. What is not discarded now goes after redis.staging_ttl_s.
            with suppress(redis.RedisError, OSError):
                await asyncio.shield(perform_async(self._client, self._store.discard(file)))
            raise
        finally:
            self._counts.open_uploads -= 1

    async def _stage_and_keep(self, request: Request, form: UploadForm, file: NewFile) -> StoredFile:
        staged = _StagedLines(self._client, self._store, self._limits, file)
        await staged.look_for_room()
        try:
            async with asyncio.timeout(self._serve.upload_timeout_s) as limit:
                async for chunk in self._chunks(request):
                    await staged.add(form.feed(chunk))
        except TimeoutError:
            if not limit.expired():
                raise
            told = f"the file has not come within {self._serve.upload_timeout_s} s (serve.upload_timeout_s)"
            raise ApiError(told, status=408) from None
        form.check_whole()
        ttl_s = self._ttl_s(form.fields)
        await staged.send()
        if staged.digest.num_lines == 0:
            raise EmptyJob
        lines = staged.digest.staged(file.nonce)
        keeping = self._store.keep(file, form.filename or "", lines, staged.digest.num_lines, ttl_s)
        return await perform_async(self._client, keeping)

    async def _chunks(self, request: Request) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ApiError where it stops, or has more bytes than any file may."""
        most = self._limits.max_job_bytes + 2 * self._limits.max_prompts_per_job + MAX_FORM_BYTES
        num_bytes = 0
        async for chunk in body_parts(request, self._serve.read_timeout_s):
            num_bytes += len(chunk)
            self._counts.uploaded_bytes += len(chunk)
            if num_bytes > most:
                raise JobTooLarge("job_bytes", num_bytes, self._limits.max_job_bytes, is_whole=False)
            yield chunk

    def _ttl_s(self, fields: dict[str, bytes]) -> int:
        """How long the file is to be kept. Raises ApiError for fields that are missing or not accepted."""
        texts = {name: value.decode("utf-8", "replace") for name, value in fields.items()}
        purpose = texts.get("purpose")
        if purpose != "batch":
            code = "missing_required_parameter" if purpose is None else "invalid_value"
            raise ApiError(f"purpose is {purpose!r}; accepted: batch", param="purpose", code=code)
        anchor, seconds = texts.get("expires_after[anchor]"), texts.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return self._serve.file_ttl_s
        if anchor != "created_at":
            raise ApiError(f"expires_after[anchor] is {anchor!r}; accepted: created_at", param="expires_after[anchor]")
        return whole_number("expires_after[seconds]", seconds or "", LEAST_TTL_S, MOST_TTL_S)


def idempotency_key(request: Request) -> str | None:
    """The request's own key, by which a second try of it is known. Raises ApiError for one that is not accepted."""
    given = request.headers.getlist("idempotency-key")
    if not given:
        return None
    if len(given) > 1 or not 0 < len(given[0]) <= MAX_IDEMPOTENCY_KEY:
        raise ApiError(f"Idempotency-Key: accepted: once, 1 to {MAX_IDEMPOTENCY_KEY} characters")
    return given[0]


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError("the Content-Type is not multipart/form-data with a boundary", status=415)
    if len(boundary) > MAX_BOUNDARY_LENGTH:
        problem = f"the form's boundary has {len(boundary)} bytes; accepted: at most {MAX_BOUNDARY_LENGTH}"
        raise ApiError(problem, param="Content-Type")
    return boundary
