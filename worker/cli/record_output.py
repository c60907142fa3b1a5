"""Records to a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import BinaryIO

from worker.cli.data_files import write_line
from worker.records.encode_record import encode_record


def write_records(records: Iterable[Mapping[str, object]], target: BinaryIO) -> None:
    """Write records as JSON lines, each as soon as it is there."""
    for record in records:
        write_line(target, encode_record(record))
