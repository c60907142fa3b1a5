"""The files of request lines that a command line names."""

from __future__ import annotations

import glob
import io
import os
import stat
import sys
from collections.abc import Sequence
from functools import partial

from worker.cli.bad_usage import BadUsage
from worker.cli.data_files import STANDARD
from worker.lines.input_file import InputFile


def input_files(names: Sequence[str]) -> list[InputFile]:
    """The files in the order they are given, those of a pattern such as 'day-*.jsonl' sorted by name.

    A name is a pattern only where no file is called so; - is stdin. Raises BadUsage for what is not there or cannot be
    read: nothing is submitted or run of half an input.
    """
    if names.count(STANDARD) > 1:
        raise BadUsage("- is given twice; accepted: standard input once")
    return [_input_file(path) for name in names for path in _paths(name)]


def _paths(name: str) -> list[str]:
    if name == STANDARD or os.path.lexists(name) or not glob.has_magic(name):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    if not found:
        raise BadUsage(f"{name}: no file has such a name")
    return found


def _input_file(path: str) -> InputFile:
    if path == STANDARD:
        if sys.stdin is None:  # so Python has it where descriptor 0 is closed
            raise BadUsage("-: standard input is closed; accepted: a file, a pipe or a terminal")
        return InputFile(STANDARD, _open_stdin, stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode))
    try:
        is_complete = stat.S_ISREG(os.stat(path).st_mode)
        # A pipe is opened once: whoever writes to it would find its reader gone.
        if is_complete or os.path.isdir(path):
            _open(path).close()
    except OSError as error:
        raise BadUsage(f"{path}: {error.strerror}") from error
    return InputFile(path, partial(_open, path), is_complete)


def _open(path: str) -> io.BufferedReader:
    return open(path, "rb")


def _open_stdin() -> io.BufferedReader:
    """A reader of its own, which leaves the descriptor open.

    At exit Python waits for the lock of sys.stdin, and a thread may still be reading.
    """
    return open(sys.stdin.fileno(), "rb", closefd=False)
