"""Opens the files that a command reads and writes, where `-` is stdin or stdout, and sends records to them."""

from __future__ import annotations

import glob
import gzip
import io
import os
import signal
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from worker.cli.exit_codes import BadUsage, CommandError, Interrupted, stop_signals
from worker.lines.errors import UnreadableInput
from worker.lines.files import InputFile, refuse_other_formats
from worker.records.record import BatchFile, encode_record
from worker.storage.objects import check_writable, find_objects, writing_object
from worker.storage.urls import WEB, ObjectUrl, StorageError, file_path, is_url, object_url

STANDARD = "-"
GZIP_SUFFIX = ".gz"

# A flush ends a compression block: with one for each record a file of short records grows by half.
FLUSH_EVERY_S = 1.0

OUTPUT_NAME = "output.jsonl"
ERRORS_NAME = "errors.jsonl"
OUTPUT_HELP = f"- is stdout, NAME.gz is compressed, a directory (or NAME/) gets {OUTPUT_NAME} and {ERRORS_NAME}."
OBJECT_HELP = "s3://, gs:// and az:// name an object, which is there once it is whole, when the job has ended."

WriteRecord = Callable[[Mapping[str, object]], None]


def input_files(names: Sequence[str]) -> list[InputFile]:
    """The files in the given order, those of a pattern such as 'day-*.jsonl' sorted by name; - is stdin.

    URLs name objects likewise. A name is a pattern only if no file is called so. Raises BadUsage if one is missing,
    unreadable or of another format (a table, weights), so that half an input is never submitted or run.
    """
    if names.count(STANDARD) > 1:
        raise BadUsage("- is given twice; accepted: standard input once")
    return [file for name in map(local_name, names) for file in (_objects(name) if is_url(name) else _files(name))]


def can_be_read_again(file: InputFile) -> bool:
    """Whether its lines can be read a second time: those of a pipe, or of standard input, cannot."""
    return file.is_complete and file.name != STANDARD


def local_name(name: str) -> str:
    """The path that a file:// URL means; any other name as it is. Raises BadUsage."""
    with _usable_url():
        return file_path(name) or name


@contextmanager
def _usable_url(kind: type[CommandError] = BadUsage) -> Iterator[None]:
    """Raise BadUsage, or another error of a command, for what is wrong with a URL or with what it names."""
    try:
        yield
    except StorageError as error:
        raise kind(str(error)) from error


def _objects(name: str) -> list[InputFile]:
    with _usable_url():
        files = [found.file for found in find_objects(object_url(name))]
    for file in files:
        _refuse_other_formats(file)
    return files


def _files(name: str) -> list[InputFile]:
    return [_input_file(path) for path in _paths(name)]


def _paths(name: str) -> list[str]:
    if name == STANDARD or os.path.lexists(name) or not glob.has_magic(name):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    if not found:
        raise BadUsage(f"{name}: no file has such a name")
    return found


def _input_file(path: str) -> InputFile:
    if path == STANDARD:
        if sys.stdin is None:  # descriptor 0 is closed
            raise BadUsage("-: standard input is closed; accepted: a file, a pipe or a terminal")
        return InputFile(STANDARD, _open_stdin, stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode))
    with usable(path):
        is_complete = stat.S_ISREG(os.stat(path).st_mode)
        # Not a pipe: the process that writes to it would lose its reader.
        if is_complete or os.path.isdir(path):
            _open(path).close()
    file = InputFile(path, partial(_open, path), is_complete)
    if is_complete:
        _refuse_other_formats(file)
    return file


def _refuse_other_formats(file: InputFile) -> None:
    try:
        refuse_other_formats(file)
    except UnreadableInput as error:
        raise BadUsage(str(error)) from error


@contextmanager
def usable(path: str) -> Iterator[None]:
    """Raise BadUsage where the system refuses what is done with this path."""
    try:
        yield
    except OSError as error:
        raise BadUsage(f"{path}: {error.strerror}") from error


def _open(path: str) -> io.BufferedReader:
    return open(path, "rb")


def _open_stdin() -> io.BufferedReader:
    """Not sys.stdin, for whose lock Python waits at exit, when a thread may still read. Leaves the descriptor open."""
    return open(sys.stdin.fileno(), "rb", closefd=False)


@contextmanager
def open_output(path: str, *, appends: bool = False, identity: Mapping[str, str] | None = None) -> Iterator[BinaryIO]:
    """Open `path` for writing; a file that exists is replaced, one whose name ends in .gz is compressed.

    With `appends` what is in the file stays, and compressed data go behind it as gzip of their own, which readers take
    for one. Raises BadUsage if it cannot be opened. A URL's object is there at the end of the block, and not after an
    error, with `identity` (see writing_object); what fails in between is a CommandError.
    """
    if is_url(path):
        with _usable_url(CommandError), _open_object(object_url(path), identity or {}) as file:
            yield file
        return
    if path == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with usable(path):
        # Closed below: only the opening may raise BadUsage.
        file = Path(path).open("ab" if appends else "wb")  # noqa: SIM115
    with file:
        if not path.endswith(GZIP_SUFFIX):
            yield file
            return
        with GzipOutput(file) as compressed:
            yield cast("BinaryIO", compressed)


@contextmanager
def _open_object(url: ObjectUrl, identity: Mapping[str, str]) -> Iterator[BinaryIO]:
    with writing_object(url, identity) as file:
        if not url.key.endswith(GZIP_SUFFIX):
            yield cast("BinaryIO", file)
            return
        with GzipObject(filename="", mode="wb", fileobj=cast("BinaryIO", file), mtime=0) as compressed:
            yield cast("BinaryIO", compressed)


def is_stream(path: str) -> bool:
    """Whether it is standard output, a pipe or a device: what was written there cannot be read again."""
    return path == STANDARD or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def check_output(path: str) -> None:
    """Raise BadUsage where open_output would; leaves a file that exists as it is, else makes an empty one.

    Of an object nothing is made: an upload is begun and given up, also on SIGINT and SIGTERM, which raise Interrupted.
    """
    if is_url(path):
        with stop_signals(signal.SIGINT, signal.SIGTERM) as should_stop, _usable_url():
            check_writable(object_url(path))
        if should_stop():
            raise Interrupted(f"interrupted; nothing is written to {path}")
        return
    if is_stream(path):  # closing a pipe would end it for its reader
        return
    with usable(path):
        Path(path).open("ab").close()


def refuse_same_file(path: str, *, other: str, role: str) -> None:
    """Raise BadUsage if `path` is the other file, which writing would destroy; `role` names that one: "input"."""
    if STANDARD in (path, other):
        return
    if is_url(path) or is_url(other):
        if path == other:
            raise BadUsage(f"{path} is also the {role}; accepted: another object")
        return
    try:
        same = os.path.samefile(path, other)
    except OSError:  # one of them does not exist yet
        same = os.path.realpath(path) == os.path.realpath(other)
    if same:
        raise BadUsage(f"{path} is also the {role}; accepted: another file")


def write_line(file: BinaryIO, line: str) -> None:
    """Write one line and flush it: readers wait for no buffer, and a kill loses no line. But see GzipOutput."""
    file.write(line.encode("ascii") + b"\n")
    file.flush()


class GzipOutput(gzip.GzipFile):
    """Flushes at most once a second, when something is written, and at the end.

    A kill loses at most what one second wrote, which stays unflushed until the next write, however late that is.
    """

    def __init__(self, file: BinaryIO) -> None:
        # Without name and time, so that equal records make equal files.
        super().__init__(filename="", mode="wb", fileobj=file, mtime=0)
        self._flushed_at_s = time.monotonic()

    def flush(self, zlib_mode: int = zlib.Z_SYNC_FLUSH) -> None:
        """Flush, unless the last one was within a second: then a later call does."""
        now_s = time.monotonic()
        if now_s - self._flushed_at_s >= FLUSH_EVERY_S:
            super().flush(zlib_mode)
            self._flushed_at_s = now_s


class GzipObject(gzip.GzipFile):
    """Is flushed at its end alone: the time of a flush shows in the bytes, and those of an object are to be the same
    whoever writes them."""

    def flush(self, zlib_mode: int = zlib.Z_SYNC_FLUSH) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class RecordPaths:
    """One file for all records or, as at OpenAI, one for those with an answer and one for those without."""

    output: str
    errors: str | None  # None: with the others

    @classmethod
    def of(cls, output: str, errors: str | None = None) -> Self:
        """As `-o` and `--errors-file` say; a directory gets output.jsonl and errors.jsonl, and is made if need be.

        A name that ends in / is a directory. Raises BadUsage if it cannot be made, if both files are one, and where one
        is an object and the other is not: neither is there before both are whole.
        """
        output, errors = local_name(output), None if errors is None else local_name(errors)
        if is_url(output) or is_url(errors or ""):
            return cls._of_objects(output, errors)
        if output != STANDARD and (output.endswith(os.sep) or os.path.isdir(output)):
            with usable(output):
                Path(output).mkdir(parents=True, exist_ok=True)
            errors = str(Path(output, ERRORS_NAME)) if errors is None else errors
            output = str(Path(output, OUTPUT_NAME))
        if errors is not None:
            if output == errors == STANDARD:
                raise BadUsage("--errors-file -: standard output is the output's; accepted: a file")
            refuse_same_file(errors, other=output, role="output")
        return cls(output, errors)

    @classmethod
    def _of_objects(cls, output: str, errors: str | None) -> Self:
        url = _output_url(output)
        if url.is_folder:
            errors = f"{url.name}{ERRORS_NAME}" if errors is None else errors
            url = url.at(f"{url.key}{OUTPUT_NAME}")
        named = None if errors is None else _output_url(errors)
        if named is not None and (named.is_folder or named == url):
            raise BadUsage(f"--errors-file {named.name}: accepted: another object than the output's")
        return cls(url.name, None if named is None else named.name)

    def __iter__(self) -> Iterator[str]:
        yield self.output
        if self.errors is not None:
            yield self.errors


def _output_url(path: str) -> ObjectUrl:
    """The object of a URL, or the folder. Raises BadUsage for one that cannot be written to, and for a local name."""
    if not is_url(path):
        raise BadUsage(f"{path}: accepted: an object beside an object, a file beside a file")
    with _usable_url():
        url = object_url(path)
    if url.scheme in WEB:
        raise BadUsage(f"{url.name}: accepted for output: s3://, gs://, az://, or a file")
    return url


@contextmanager
def record_output(
    paths: RecordPaths, *, appends: bool = False, identity: Mapping[str, str] | None = None
) -> Iterator[WriteRecord]:
    """Open the files; yields a function that writes a record to its file at once, as a JSON line. Raises BadUsage.

    Objects, see open_output, are there at the end of the block: that of the errors first.
    """
    options: Any = {"appends": appends, "identity": identity}
    errors = open_output(paths.errors, **options) if paths.errors is not None else nullcontext(None)
    with open_output(paths.output, **options) as output_file, errors as errors_file:

        def write(record: Mapping[str, object]) -> None:
            file = output_file
            if errors_file is not None and BatchFile.of_record(record) is BatchFile.ERROR:
                file = errors_file
            write_line(file, encode_record(record))

        yield write


def write_records(records: Iterable[Mapping[str, object]], write: WriteRecord) -> None:
    """Write records as they come."""
    for record in records:
        write(record)
