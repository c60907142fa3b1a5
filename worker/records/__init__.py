"""Result records: one line of OpenAI Batch output for each line of a job.

Pure: neither torch nor the engine is imported.
"""

from __future__ import annotations

from worker.records.batch_file import BatchFile
from worker.records.encode_record import encode_record, has_failed
from worker.records.error_record import error_record, line_error_record
from worker.records.failure import Failure
from worker.records.record_context import RecordContext
from worker.records.success_record import success_record
from worker.records.unfinished import Unfinished
from worker.records.unfinished_record import unfinished_record

__all__ = [
    "success_record",
    "error_record",
    "line_error_record",
    "unfinished_record",
    "RecordContext",
    "Failure",
    "Unfinished",
    "encode_record",
    "has_failed",
    "BatchFile",
]
