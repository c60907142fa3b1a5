"""Reads objects by ranges as files, finds those of a pattern, and writes objects that are seen once they are whole."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from worker.lines.errors import UnreadableInput
from worker.lines.files import InputFile
from worker.storage.stores import REPLACED, named_errors, open_store
from worker.storage.urls import WEB, KeyPattern, ObjectUrl, StorageError

if TYPE_CHECKING:
    from obstore import GetOptions, WritableFile
    from obstore.store import ObjectStore

# What is fetched at a time: little at first, since of many files only the beginning is looked at, then more.
FIRST_RANGE_BYTES = 64 * 1024
LARGEST_RANGE_BYTES = 8 * 1024 * 1024
BUFFER_BYTES = 128 * 1024
WEAK = "W/"  # how the ETag begins of a server that does not vouch for every byte

# S3 takes 10,000 parts: 80 GB, more than a Redis holds of a job. So many are under way at once, and in memory.
PART_BYTES = 8 * 1024 * 1024
PARTS_AT_ONCE = 4
GATHERED_BYTES = 1024 * 1024  # handed on together: a record of 200 bytes costs no call of its own


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object as it was found: what is read later is this one, or an error."""

    store: ObjectStore
    url: ObjectUrl
    num_bytes: int
    e_tag: str | None  # None: the server has none, and a change between two ranges stays unseen

    def open(self) -> io.BufferedReader:
        """A file of its bytes. Reading raises UnreadableInput."""
        return io.BufferedReader(_ObjectReader(self), BUFFER_BYTES)

    @property
    def file(self) -> InputFile:
        """A file of request lines, named by its URL."""
        return InputFile(self.url.name, self.open, is_complete=True)


def find_objects(url: ObjectUrl) -> list[FoundObject]:
    """The object of this URL, or those of its pattern, sorted by key. Raises StorageError where there is none."""
    store = open_store(url)
    with named_errors(url):
        if url.scheme in WEB:
            return [_web_object(store, url)]
        if url.is_folder:
            raise StorageError(
                url.name, f"it is a folder; accepted: an object, or a pattern such as '{url.name}*.jsonl'"
            )
        found = _matching(store, url) if url.is_pattern else [_found(store, url, _head(store, url.key))]
    if not found:
        raise StorageError(url.name, "no object has such a name")
    return found


def _head(store: ObjectStore, key: str) -> Mapping[str, Any]:
    import obstore  # noqa: PLC0415 - an extra

    return cast("Mapping[str, Any]", obstore.head(store, key))


def _found(store: ObjectStore, url: ObjectUrl, meta: Mapping[str, Any]) -> FoundObject:
    return FoundObject(store, url.at(meta["path"]), meta["size"], _entity_tag(meta["e_tag"]))


def _entity_tag(found: str | None) -> str | None:
    """An ETag as HTTP has it, in quotes: lists of some servers leave these out, and If-Match takes none without."""
    return f'"{found}"' if found and not found.endswith('"') else found


def _matching(store: ObjectStore, url: ObjectUrl) -> list[FoundObject]:
    import obstore  # noqa: PLC0415 - an extra

    pattern = KeyPattern.of(url.key)
    if pattern.is_deep:
        pages: Any = obstore.list(store, prefix=pattern.folder)
    else:
        pages = [obstore.list_with_delimiter(store, prefix=pattern.folder)["objects"]]
    metas = [meta for page in pages for meta in page if meta["path"] == url.key or pattern.matches(meta["path"])]
    exact = [meta for meta in metas if meta["path"] == url.key]  # a key that only looks like a pattern
    return [_found(store, url, meta) for meta in sorted(exact or metas, key=lambda meta: str(meta["path"]))]


def _web_object(store: ObjectStore, url: ObjectUrl) -> FoundObject:
    """By a GET: a signed URL is signed for that alone."""
    import obstore  # noqa: PLC0415 - an extra
    from obstore.exceptions import GenericError, NotSupportedError  # noqa: PLC0415

    try:
        meta = obstore.get(store, url.key, options={"range": (0, FIRST_RANGE_BYTES)}).meta
    except NotSupportedError:
        accepted = f"curl '{url.name}' | millrace submit -"
        raise StorageError(url.name, f"its server does not give parts of a file; accepted: {accepted}") from None
    except GenericError as error:
        if "status code: 416" not in str(error):
            raise
        return FoundObject(store, url, 0, None)  # no byte of it can be asked for
    return FoundObject(store, url, meta["size"], meta["e_tag"])


class _ObjectReader(io.RawIOBase):
    """The bytes of an object, at most one range of them in memory."""

    def __init__(self, found: FoundObject) -> None:
        self._found = found
        self._position = 0  # of the next byte to be fetched
        self._range_bytes = FIRST_RANGE_BYTES
        self._fetched = memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - typeshed's own type has no name at run time
        """Up to as many bytes as fit, 0 at the end. Raises UnreadableInput."""
        if not self._fetched and self._position < self._found.num_bytes:
            self._fetch()
        count = min(len(buffer), len(self._fetched))
        buffer[:count] = self._fetched[:count]
        self._fetched = self._fetched[count:]
        return count

    def _fetch(self) -> None:
        import obstore  # noqa: PLC0415 - an extra

        found = self._found
        end = min(self._position + self._range_bytes, found.num_bytes)
        options: GetOptions = {"range": (self._position, end)}
        if found.e_tag is not None and not found.e_tag.startswith(WEAK):  # which matches nothing (RFC 9110, 13.1.1)
            options["if_match"] = found.e_tag
        self._fetched = memoryview(b"")  # not two ranges at once
        try:
            with named_errors(found.url):
                reply = obstore.get(found.store, found.url.key, options=options)
                e_tag, data = _entity_tag(reply.meta["e_tag"]), reply.bytes()
        except StorageError as error:
            raise UnreadableInput(error.name, error.reason) from error
        if found.e_tag and e_tag and e_tag.removeprefix(WEAK) != found.e_tag.removeprefix(WEAK):
            raise UnreadableInput(found.url.name, REPLACED)
        if len(data) != end - self._position:
            raise UnreadableInput(found.url.name, f"its server gave {len(data)} of {end - self._position} bytes")
        self._fetched, self._position = memoryview(data), end
        self._range_bytes = min(2 * self._range_bytes, LARGEST_RANGE_BYTES)


class ObjectWriter:
    """Takes the bytes of an object as a file does; see writing_object."""

    def __init__(self, url: ObjectUrl, file: WritableFile) -> None:
        self._url = url
        self._file = file
        self._gathered = bytearray()

    def write(self, data: bytes) -> int:
        """Take bytes; waits while as many parts are under way as may be. Raises StorageError."""
        self._gathered += data
        if len(self._gathered) >= GATHERED_BYTES:
            self._hand_on()
        return len(data)

    def flush(self) -> None:
        """Nothing: an object is not seen before its end."""

    def close(self) -> None:
        """Send the last part and have the store make the object of all of them. Raises StorageError."""
        self._hand_on()
        with named_errors(self._url):
            self._file.close()

    def abort(self, error: BaseException) -> None:
        """Have the store forget the parts, if it can be had."""
        with suppress(Exception):
            self._file.__exit__(type(error), error, error.__traceback__)

    def _hand_on(self) -> None:
        with named_errors(self._url):
            self._file.write(bytes(self._gathered))
        self._gathered.clear()


@contextmanager
def writing_object(url: ObjectUrl, identity: Mapping[str, str]) -> Iterator[ObjectWriter]:
    """Write an object: all of it is there at the end of the block, in one step, and nothing of it after any error.

    It is sent in parts, which an error of the block or of the network has the store forget; those of a process that is
    killed are the store's to clear away (a bucket's rule for incomplete uploads). `identity`, values in ASCII and
    names of small letters alone, is kept with it: what holds_object compares. Raises StorageError.
    """
    import obstore  # noqa: PLC0415 - an extra

    store = open_store(url)
    attributes = {"Content-Type": "application/jsonl", **identity}
    with named_errors(url):
        file = obstore.open_writer(
            store, url.key, attributes=attributes, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
        )
    writer = ObjectWriter(url, file)
    try:
        yield writer
    except BaseException as error:
        writer.abort(error)
        raise
    try:
        writer.close()
    except BaseException as error:
        writer.abort(error)
        # The reply that all is done may have been lost: then the store knows no such upload any more.
        if not isinstance(error, StorageError) or not identity or not holds_object(url, identity):
            raise


def holds_object(url: ObjectUrl, identity: Mapping[str, str]) -> bool:
    """Whether an object is there that was written as this. Raises StorageError."""
    import obstore  # noqa: PLC0415 - an extra

    store = open_store(url)
    with named_errors(url):
        try:
            attributes = obstore.get(store, url.key, options={"head": True}).attributes
        except FileNotFoundError:
            return False
    return identity.items() <= {str(name): value for name, value in attributes.items()}.items()


def check_writable(url: ObjectUrl) -> None:
    """Raise StorageError where writing_object would at once; begins an upload, of two bytes, and gives it up.

    The second byte waits for the reply to the first: Azure hears of an upload only by its parts.
    """
    import obstore  # noqa: PLC0415 - an extra

    store = open_store(url)
    with named_errors(url):
        file = obstore.open_writer(store, url.key, buffer_size=1, max_concurrency=1)
    try:
        with named_errors(url):
            file.write(b".")
            file.write(b".")
    finally:
        ObjectWriter(url, file).abort(InterruptedError())
