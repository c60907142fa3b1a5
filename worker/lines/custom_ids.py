"""The custom_ids of one job, each of which may stand once."""

from __future__ import annotations

import hashlib

from worker.lines.line_error import LineError
from worker.lines.request_line import RequestLine


class CustomIds:
    """Remembers which custom_ids a job has used.

    It keeps 16-byte digests, not the ids: an id may have 512 characters, a streamed file millions of lines.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, line: RequestLine) -> None:
        """Take `line`'s custom_id. Raises LineError if an earlier line has it: the first one keeps it."""
        digest = hashlib.blake2b(line.custom_id.encode("utf-8"), digest_size=16).digest()
        if digest in self._seen:
            raise LineError(
                f"custom_id {line.custom_id!r} was used by an earlier line; accepted: each custom_id once",
                code="duplicate_custom_id",
                index=line.index,
                param="custom_id",
                custom_id=line.custom_id,
            )
        self._seen.add(digest)
