"""Keeps uploaded files: their lines, apart from any job's, and what is known of them, by tenant.

A file belongs to the tenant under whose key it lies, so nobody can ask for another's. Each method is an exchange that
`perform` or `perform_async` holds with Redis.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from settings import LimitSettings, RedisSettings, ServeSettings
from worker.registry.errors import FileChanged, FileReused, FileUnknown, TooManyFiles
from worker.registry.exchange import Exchange, raw_values, text
from worker.registry.intake import READ_LINES, Staged, parts_of
from worker.registry.keys import Keys
from worker.registry.lua import Scripts


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file whose lines are in Redis. Blank lines and line ends are not kept: each line is read back with a `\\n`."""

    id: str
    filename: str
    num_lines: int
    num_line_bytes: int
    digest: str  # of its lines, see LineDigest
    created_at: int  # Unix seconds, as the next
    expires_at: int

    @property
    def num_bytes(self) -> int:
        """Of all lines with their ends."""
        return self.num_line_bytes + self.num_lines

    @classmethod
    def of_entry(cls, file_id: str, entry: str) -> Self:
        """The file of an entry in its tenant's files."""
        created_ms, expires_ms, num_bytes, about = entry.split(" ", 3)
        known = json.loads(about)
        return cls(
            id=file_id,
            filename=known["filename"],
            num_lines=known["n"],
            num_line_bytes=int(num_bytes),
            digest=known["digest"],
            created_at=int(created_ms) // 1000,
            expires_at=int(expires_ms) // 1000,
        )


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file as it comes: where its lines are staged, and whose it will be."""

    id: str
    nonce: str  # of this upload, so that another of the same file does not mix its lines with these
    tenant: str
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class FileRoom:
    """What a tenant may add to its files; keep_file.lua has the last word."""

    num_used_bytes: int  # of lines
    max_bytes: int

    def check(self, num_bytes: int) -> None:
        """Raise TooManyFiles if no file of so many bytes of lines fits in."""
        if self.num_used_bytes + num_bytes > self.max_bytes:
            raise TooManyFiles("bytes", self.num_used_bytes, self.max_bytes)


class FileStore:
    """Stages, keeps, lists, reads and deletes files."""

    def __init__(self, keys: Keys, redis: RedisSettings, limits: LimitSettings, serve: ServeSettings) -> None:
        self._keys = keys
        self._redis = redis
        self._limits = limits
        self._serve = serve

    def room(self, file: NewFile) -> Exchange[FileRoom]:
        """What there is for a file that begins to come. Raises TooManyFiles where the tenant has all it may have."""
        found = yield from self.all(file.tenant)
        others = [other for other in found if other.id != file.id]
        room = FileRoom(sum(other.num_line_bytes for other in others), self._serve.max_tenant_file_bytes)
        if len(others) == len(found):  # it is not one that was kept before
            if len(found) >= self._serve.max_tenant_files:
                raise TooManyFiles("files", len(found), self._serve.max_tenant_files)
            room.check(1)
        return room

    def stage(self, file: NewFile, first_index: int, lines: Sequence[bytes]) -> Exchange[None]:
        """Add lines of a file that comes; Redis forgets them after redis.staging_ttl_s."""
        staged = self._keys.file_lines(file.id, file.nonce)
        staging_ms = self._redis.staging_ttl_s * 1000
        yield [
            Scripts.STAGE(
                {"job": f"{staged}:job", "staged": staged}, enumerate(lines, first_index), staging_ms=staging_ms
            )
        ]

    def discard(self, file: NewFile) -> Exchange[None]:
        """Forget the lines of a file that will not come whole."""
        yield [("UNLINK", self._keys.file_lines(file.id, file.nonce))]

    def keep(self, file: NewFile, filename: str, lines: Staged, num_lines: int, ttl_s: int) -> Exchange[StoredFile]:
        """Keep a file that is staged whole for `ttl_s`.

        One that was kept before under this id is returned as it is. Raises TooManyFiles, FileReused for other lines
        under an idempotency key, and FileChanged where lines are gone.
        """
        keys = {
            "staged": self._keys.file_lines(file.id, file.nonce),
            "file_lines": self._keys.file_lines(file.id),
            "files": self._keys.files(file.tenant),
        }
        about = {"filename": filename, "n": num_lines, "digest": lines.digest}
        [(status, *rest)] = yield [
            Scripts.KEEP_FILE(
                keys, file_id=file.id, num_lines=num_lines, num_bytes=lines.num_bytes, about=json.dumps(about),
                keep_ms=ttl_s * 1000, max_files=self._serve.max_tenant_files,
                max_bytes=self._serve.max_tenant_file_bytes,
            )
        ]  # fmt: skip
        if text(status) == "incomplete":
            raise FileChanged(num_lines, *rest)
        if text(status) == "full":
            raise TooManyFiles(text(rest[0]), int(rest[1]), int(rest[2]))
        kept = StoredFile.of_entry(file.id, text(rest[0]))
        if kept.digest != lines.digest:
            raise FileReused(file.id, file.idempotency_key)
        return kept

    def find(self, tenant: str, file_id: str) -> Exchange[StoredFile]:
        """A file of this tenant. Raises FileUnknown."""
        if not self._keys.is_file_id(file_id):
            raise FileUnknown(file_id)
        [entry, (now_s, _)] = yield [("HGET", self._keys.files(tenant), file_id), ("TIME",)]
        if entry is None or (file := StoredFile.of_entry(file_id, text(entry))).expires_at <= int(now_s):
            raise FileUnknown(file_id)
        return file

    def all(self, tenant: str) -> Exchange[list[StoredFile]]:
        """The tenant's files, the newest first."""
        [entries, (now_s, _)] = yield [("HGETALL", self._keys.files(tenant)), ("TIME",)]
        files = [StoredFile.of_entry(text(file_id), text(entry)) for file_id, entry in entries.items()]
        found = [file for file in files if file.expires_at > int(now_s)]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def delete(self, tenant: str, file_id: str) -> Exchange[None]:
        """Forget a file; jobs that were made of it go on. Raises FileUnknown."""
        file = yield from self.find(tenant, file_id)
        [num_files, _] = yield [
            ("HDEL", self._keys.files(tenant), file.id),
            ("UNLINK", self._keys.file_lines(file.id)),
        ]
        if not num_files:  # another was faster
            raise FileUnknown(file_id)

    def sizes(self, file: StoredFile, start: int) -> Exchange[list[int]]:
        """Bytes of each line, without its end, of the page that begins at line `start`; none behind the last."""
        indices = range(start, min(start + READ_LINES, file.num_lines))
        if not indices:
            return []
        sizes: list[int] = yield [("HSTRLEN", self._keys.file_lines(file.id), index) for index in indices]
        return sizes

    def lines(self, file: StoredFile, indices: range) -> Exchange[list[bytes]]:
        """These lines. Raises FileUnknown if the file was deleted, or has expired, since it was found."""
        [values] = yield [("HMGET", self._keys.file_lines(file.id), *indices)]
        lines = [line for line in raw_values(values) if line is not None]
        if len(lines) < len(indices):
            raise FileUnknown(file.id)
        return lines

    @staticmethod
    def parts(start: int, sizes: Sequence[int]) -> Iterator[range]:
        """Lines from `start` on, of these sizes, in parts that may be asked for at once."""
        return parts_of(range(start, start + len(sizes)), sizes)
