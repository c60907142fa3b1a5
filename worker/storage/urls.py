"""Takes apart URLs of objects: s3://, gs:// and az:// with bucket and key, https:// and http:// as they are, file://.

A key stands as it is, as in the vendors' own tools: nothing in it is an escape, a query or a fragment.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import urlsplit
from urllib.request import url2pathname

BUCKETS = ("s3", "gs", "az")
WEB = ("https", "http")
FILE = "file"
_ACCEPTED = "accepted: s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY, file:///PATH, for input also https://"

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


class StorageError(OSError):
    """A URL that cannot be used, or an object that cannot be listed or written; no secret of the URL is in the message.

    An object that cannot be read is `worker.lines.errors.UnreadableInput`.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    """Where an object is, or where several are."""

    scheme: str  # one of BUCKETS or WEB
    bucket: str  # of WEB: the whole URL, which may hold a signature and is never shown
    key: str  # of WEB: empty; of BUCKETS without a leading /

    @property
    def name(self) -> str:
        """The URL as it is shown: that of a web server without its query, where signatures stand."""
        if self.scheme not in WEB:
            return f"{self.scheme}://{self.bucket}/{self.key}"
        parts = urlsplit(self.bucket)
        shown = f"{self.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
        return f"{shown}?..." if parts.query else shown

    @property
    def is_folder(self) -> bool:
        """Whether it names no object but where some are: its key is empty or ends in /."""
        return self.scheme in BUCKETS and (not self.key or self.key.endswith("/"))

    @property
    def is_pattern(self) -> bool:
        """Whether it may mean several objects, by `*`, `?` or `[`."""
        return self.scheme in BUCKETS and glob.has_magic(self.key)

    def at(self, key: str) -> Self:
        """An object of the same bucket."""
        return replace(self, key=key)


def is_url(name: str) -> bool:
    """Whether a name of a file is a URL: a path with :// in it can be given as ./NAME."""
    return _URL.match(name) is not None


def file_path(name: str) -> str | None:
    """The path that a file:// URL means; None for any other name. Raises StorageError for another host's file."""
    match = _URL.match(name)
    if match is None or match[1].lower() != FILE:
        return None
    host, slash, path = match[2].partition("/")
    if host not in ("", "localhost") or not slash or not path:
        raise StorageError(name, "accepted: file:///PATH, a file of this machine")
    return url2pathname(f"/{path}")


def object_url(name: str) -> ObjectUrl:
    """The URL of an object. Raises StorageError for another kind, and for one that lacks its bucket or key."""
    match = _URL.match(name)
    scheme = match[1].lower() if match else ""
    if match is not None and scheme in WEB:
        return _web_url(scheme, name)
    if match is None or scheme not in BUCKETS:
        raise StorageError(_without_secrets(name), f"no URL of this kind is known; {_ACCEPTED}")
    bucket, _, key = match[2].partition("/")
    if not bucket or "@" in bucket:
        raise StorageError(_without_secrets(name), f"it names no bucket; {_ACCEPTED}")
    if any(part in ("", ".", "..") for part in key.removesuffix("/").split("/")) and key:
        raise StorageError(f"{scheme}://{bucket}/{key}", "accepted: keys without empty parts, . and .. between their /")
    return ObjectUrl(scheme, bucket, key)


def _web_url(scheme: str, name: str) -> ObjectUrl:
    try:
        parts = urlsplit(name)
        has_host, _ = bool(parts.hostname), parts.port
    except ValueError:
        has_host = False
    if not has_host:
        raise StorageError(_without_secrets(name), f"it names no host; accepted: {scheme}://HOST/PATH")
    if "@" in parts.netloc:
        raise StorageError(_without_secrets(name), "accepted: a URL without user and password, which `ps` would show")
    return ObjectUrl(scheme, name, "")


def _without_secrets(name: str) -> str:
    return re.sub(r"://[^/?#]*@", "://...@", name.partition("?")[0])


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """A key with wildcards, as the shell has them: `*` stays within a folder, `**` does not, and neither finds a name
    that begins with a dot."""

    parts: Sequence[str]  # between its /

    @classmethod
    def of(cls, key: str) -> Self:
        """The pattern that a key is."""
        return cls(key.split("/"))

    @property
    def folder(self) -> str:
        """The longest folder that all of it lies in: that is what has to be listed. Ends in / unless it is empty."""
        plain = itertools.takewhile(lambda part: not glob.has_magic(part), self.parts[:-1])
        return "".join(f"{part}/" for part in plain)

    @property
    def is_deep(self) -> bool:
        """Whether it may find keys in folders of that folder."""
        return len(self.parts) > self.folder.count("/") + 1 or self.parts[-1] == "**"

    def matches(self, key: str) -> bool:
        """Whether a key is one of the pattern's."""
        return _match(self.parts, key.split("/"))


def _match(parts: Sequence[str], names: Sequence[str]) -> bool:
    if not parts or not names:
        return not parts and not names
    part, name = parts[0], names[0]
    is_hidden = name.startswith(".") and not part.startswith(".")
    if part == "**":
        is_end = len(parts) == 1 and len(names) == 1
        deeper = (is_end or _match(parts, names[1:])) and not is_hidden
        return deeper or (len(parts) > 1 and _match(parts[1:], names))
    if glob.has_magic(part) and is_hidden:
        return False
    return fnmatch.fnmatchcase(name, part) and _match(parts[1:], names[1:])
