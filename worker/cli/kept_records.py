"""Keeps the records that earlier runs wrote: says which lines have one, mends a torn file, locks out a second run."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, BinaryIO, cast

from worker.cli.exit_codes import BadUsage
from worker.cli.files import ERRORS_NAME, GZIP_SUFFIX, OUTPUT_NAME, GzipOutput, is_stream, usable
from worker.offline import JOB_ID
from worker.records.record import has_failed

# The run, with the digest of its input if that could be read twice, and the index of the line.
_RECORD_ID = re.compile(rf"batch_req_({JOB_ID}(?:-[0-9a-f]{{16}})?)_([0-9]{{1,18}})")


def hold_output(path: str, held: ExitStack) -> None:
    """Lock the file, which is made if there is none, against other runs until `held` is closed.

    Raises BadUsage where another run has it, or it cannot be opened. Streams are left alone.
    """
    if is_stream(path):
        return
    with usable(path):
        file = held.enter_context(Path(path).open("ab"))  # noqa: SIM115 - `held` closes it
    _lock(file, path)


def _lock(file: IO[bytes], path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BadUsage(f"{path}: another run is writing to it; accepted: another file, or wait for its end") from error
    except OSError:
        return  # a file system without locks


@dataclass(slots=True)
class WholeRecords:
    """How much of a file is whole records."""

    path: str
    num_records: int = 0
    num_bytes: int = 0  # of them, unpacked
    is_torn: bool = False  # behind them stands the beginning of a record or of gzip data: its writer was killed
    lacks_line_end: bool = False  # the last record does

    def mend(self, held: ExitStack) -> None:
        """Bring a file that was cut off to the end of its last whole record; `held`: see hold_output."""
        if not self.is_torn and not self.lacks_line_end:
            return
        if self.path.endswith(GZIP_SUFFIX):
            self._pack_again(held)
            return
        with open(self.path, "r+b") as file:
            file.truncate(self.num_bytes)
            if self.lacks_line_end:
                file.seek(0, os.SEEK_END)
                file.write(b"\n")

    def _pack_again(self, held: ExitStack) -> None:
        """Nothing can be put behind torn gzip data. The new file takes the old one's place when it is on disk."""
        target = os.path.realpath(self.path)
        part = f"{target}.part"
        new = held.enter_context(open(part, "wb"))  # noqa: SIM115 - `held` closes it
        _lock(new, self.path)
        shutil.copymode(target, part)
        with gzip.open(target) as old, GzipOutput(new) as packed:
            for line in islice(old, self.num_records):
                packed.write(line if line.endswith(b"\n") else line + b"\n")
        new.flush()
        os.fsync(new.fileno())
        os.replace(part, target)


@dataclass(slots=True)
class EarlierRecords:
    """What earlier runs of one input wrote, by the index of the line."""

    run_id: str  # of all of them, see RunPart.run_id
    answered: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    models: set[str] = field(default_factory=set)  # that the answers are of
    created_s: int | None = None  # Unix time of the answers, None before the first

    def read(self, path: str) -> WholeRecords:
        """Take in a file. Raises BadUsage for what is no record of this input, and for broken gzip data."""
        whole = WholeRecords(path)
        with usable(path):
            file = gzip.open(path) if path.endswith(GZIP_SUFFIX) else open(path, "rb")  # noqa: SIM115 - closed below
        try:
            with file as lines:
                self._read(cast("BinaryIO", lines), whole)
        except EOFError:  # gzip data end in the middle
            whole.is_torn = True
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadUsage(f"{path}: its gzip data is broken ({error}); accepted: what a run wrote") from error
        return whole

    def _read(self, lines: BinaryIO, whole: WholeRecords) -> None:
        for line in lines:
            record = _json_object(line)
            if not line.endswith(b"\n"):  # the last one: cut off, or but for its end
                whole.is_torn, whole.lacks_line_end = record is None, record is not None
            if not whole.is_torn:
                self._add(record, f"{whole.path}: line {whole.num_records + 1}")
                whole.num_records += 1
                whole.num_bytes += len(line)

    def _add(self, record: Mapping[str, object] | None, where: str) -> None:
        match = None if record is None else _RECORD_ID.fullmatch(str(record.get("id")))
        if record is None or match is None:
            raise BadUsage(f"{where} is no record of `millrace run`; accepted: a file that a run wrote")
        if match[1] != self.run_id:
            raise BadUsage(f"{where} is the record of {_other_input(match[1])}; accepted: records of the same input")
        index = int(match[2])
        if has_failed(record):
            self.failed.add(index)
            return
        self.answered.add(index)
        body = cast("Mapping[str, object]", record["response"]).get("body")
        if isinstance(body, Mapping):
            self.models.add(str(body.get("model")))
            created_s = body.get("created")
            if self.created_s is None and isinstance(created_s, int):
                self.created_s = created_s


def _other_input(run_id: str) -> str:
    if run_id == JOB_ID:
        return "an input that cannot be told from others: standard input, or a run of an older version"
    return "another input: the request lines, or limits.max_prompt_bytes, have changed"


def _json_object(line: bytes) -> Mapping[str, object] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def earlier_files(path: str) -> list[str]:
    """The files of an earlier output: those that a run writes into a directory, if it is one. Raises BadUsage."""
    if not os.path.isdir(path):
        return [path]
    found = [file for name in (OUTPUT_NAME, ERRORS_NAME) if os.path.isfile(file := os.path.join(path, name))]
    if not found:
        raise BadUsage(f"{path}: has neither {OUTPUT_NAME} nor {ERRORS_NAME}; accepted: what a run wrote")
    return found
