from __future__ import annotations

from worker.lines.errors import LineError
from worker.records.failure import Unfinished, line_error_record, unfinished_record
from worker.records.record import BatchFile, RecordContext

CONTEXT = RecordContext("s0-1", "tiny", created_s=1_700_000_000)


def test_only_answers_go_to_the_output_file() -> None:
    refused = line_error_record(LineError("bad", code="invalid_json_line", index=0), CONTEXT)
    unfinished = [unfinished_record(reason, 0, "a", CONTEXT) for reason in Unfinished]
    answered = {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}

    assert BatchFile.of_record(answered) is BatchFile.OUTPUT
    assert {BatchFile.of_record(record) for record in (refused, *unfinished)} == {BatchFile.ERROR}


def test_a_files_id_names_its_job() -> None:
    assert [file.id_of("s0-1") for file in BatchFile] == ["file-s0-1-input", "file-s0-1-output", "file-s0-1-error"]
