"""The files a command writes, where `-` is stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from worker.cli.bad_usage import BadUsage
from worker.cli.gzip_output import GzipOutput

STANDARD = "-"
GZIP_SUFFIX = ".gz"


@contextmanager
def open_output(path: str) -> Iterator[BinaryIO]:
    """Open `path` for writing; a file that exists is replaced, one whose name ends in .gz is compressed.

    Raises BadUsage if it cannot be opened.
    """
    if path == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        file = Path(path).open("wb")  # noqa: SIM115 - closed below; only the opening may raise CommandError
    except OSError as error:
        raise BadUsage(f"{path}: {error.strerror}") from error
    with file:
        if not path.endswith(GZIP_SUFFIX):
            yield file
            return
        with GzipOutput(file) as compressed:
            yield cast("BinaryIO", compressed)


def check_output(path: str) -> None:
    """Raise BadUsage where open_output would; a file that exists is left as it is, one that does not is made, empty."""
    # Opening a pipe and closing it would be its end for whoever reads it.
    if path == STANDARD or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)):
        return
    try:
        Path(path).open("ab").close()
    except OSError as error:
        raise BadUsage(f"{path}: {error.strerror}") from error


def refuse_same_file(path: str, *, other: str, role: str) -> None:
    """Raise BadUsage where writing `path` would destroy the other file, the command's `role`: "input"."""
    if STANDARD in (path, other):
        return
    try:
        same = os.path.samefile(path, other)
    except OSError:  # one of them does not exist: at most the names are the same
        same = os.path.realpath(path) == os.path.realpath(other)
    if same:
        raise BadUsage(f"{path} is also the {role}; accepted: another file")


def write_line(file: BinaryIO, line: str) -> None:
    """Write one line and flush it: a reader of the file never waits for a buffer, nor loses one to a kill.

    A compressed file may lag by a second's lines, see GzipOutput.
    """
    file.write(line.encode("ascii") + b"\n")
    file.flush()
