"""Request lines on their way to Redis."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from settings import LimitSettings
from worker.registry.errors import JobTooLarge
from worker.registry.job_intake import JobIntake

# One exchange with Redis carries at most this.
CHUNK_LINES = 500
CHUNK_BYTES = 1024 * 1024

RequestObject = Mapping[str, Any]  # a line that is still to be written as JSON


class LineStaging:
    """Sends a job's lines in chunks while they are read: what is held in memory does not grow with the job."""

    def __init__(self, intake: JobIntake, limits: LimitSettings) -> None:
        self._intake = intake
        self._limits = limits

    def stage(self, job_id: str, lines: Iterable[bytes | str | RequestObject]) -> int | None:
        """Stage the lines of a new job; their number, or None if the job is accepted already.

        On any error, that of the iterable included, what was staged is forgotten. Raises JobTooLarge, and TypeError
        for what is no line.
        """
        num_lines = 0
        try:
            for chunk in self._chunks(lines):
                if not self._intake.stage(job_id, num_lines, chunk):
                    return None
                num_lines += len(chunk)
        except BaseException:
            # Also on Ctrl-C: half a job is of no use. Redis would forget it after redis.staging_ttl_s anyway.
            self._intake.discard(job_id)
            raise
        return num_lines

    def _chunks(self, lines: Iterable[bytes | str | RequestObject]) -> Iterator[list[bytes]]:
        chunk: list[bytes] = []
        chunk_bytes = num_bytes = 0
        for num_lines, line in enumerate(self._raw(lines), 1):
            num_bytes += len(line)
            if num_lines > self._limits.max_prompts_per_job:
                raise JobTooLarge("prompts", num_lines, self._limits.max_prompts_per_job)
            if num_bytes > self._limits.max_job_bytes:
                raise JobTooLarge("job_bytes", num_bytes, self._limits.max_job_bytes)
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
            # A blank one that is too long may be one that was cut, see read_raw_lines.
            if raw.strip() or len(raw) > max_bytes:
                # One byte too long is as refused as a gigabyte too long.
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
