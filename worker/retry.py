"""Reads the lines of an ended job that have no answer, for a job of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import redis

from worker.lines.parse import generated_custom_id
from worker.records.record import has_failed
from worker.registry.errors import LinesForgotten, NothingToRetry
from worker.registry.exchange import perform
from worker.registry.jobs import JobQueries, ResultReader

DUPLICATE = "duplicate_custom_id"


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
        reader = ResultReader(self._queries, self._job_id, 0, "input", follow=False)
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
