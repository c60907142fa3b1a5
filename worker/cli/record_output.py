"""Records to files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from worker.cli.data_files import open_output, write_line
from worker.cli.record_paths import RecordPaths
from worker.records.batch_file import BatchFile
from worker.records.encode_record import encode_record

WriteRecord = Callable[[Mapping[str, object]], None]


@contextmanager
def record_output(paths: RecordPaths) -> Iterator[WriteRecord]:
    """Open the files; what is yielded writes a record where it belongs, as a JSON line, at once. Raises BadUsage."""
    errors = open_output(paths.errors) if paths.errors is not None else nullcontext(None)
    with open_output(paths.output) as output_file, errors as errors_file:

        def write(record: Mapping[str, object]) -> None:
            file = output_file
            if errors_file is not None and BatchFile.of_record(record) is BatchFile.ERROR:
                file = errors_file
            write_line(file, encode_record(record))

        yield write


def write_records(records: Iterable[Mapping[str, object]], write: WriteRecord) -> None:
    """Write records, each as soon as it is there."""
    for record in records:
        write(record)
