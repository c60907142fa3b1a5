"""The files of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from worker.records.encode_record import has_failed


class BatchFile(StrEnum):
    """What OpenAI keeps in three files: a job's lines, its successes, and the records of what has no answer.

    Here the records are one stream in Redis, and which file one belongs to can be told from the record. So a file id
    is a name for programs that look whether there is one; `millrace results JOB -o OUTPUT --errors-file ERRORS` writes
    both files.
    """

    INPUT = "input"
    OUTPUT = "output"
    ERROR = "error"  # refused, failed, expired and cancelled requests

    @classmethod
    def of_record(cls, record: Mapping[str, object]) -> BatchFile:
        """The file that `record` belongs to."""
        return cls.ERROR if has_failed(record) else cls.OUTPUT

    def id_of(self, job_id: str) -> str:
        """The file's id: file-<job id>-<input, output or error>."""
        return f"file-{job_id}-{self.value}"
