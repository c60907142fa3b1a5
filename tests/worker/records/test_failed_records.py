from __future__ import annotations

import json

import pytest

from tests.support.request_lines import completion_line, error_of
from worker.records.failure import Failure, Unfinished, error_record, line_error_record, unfinished_record
from worker.records.record import RecordContext, encode_record, has_failed

CONTEXT = RecordContext("s0-1", "tiny", created_s=0)


def test_a_bad_line_has_openais_error_body_and_its_line_number() -> None:
    error = error_of(completion_line(custom_id="mine", top_p=2), index=11)

    assert line_error_record(error, CONTEXT) == {
        "id": "batch_req_s0-1_11",
        "custom_id": "mine",
        "response": {
            "status_code": 400,
            "request_id": "req_s0-1_11",
            "body": {
                "error": {
                    "message": "top_p is 2; accepted: above 0, at most 1",
                    "type": "invalid_request_error",
                    "param": "top_p",
                    "code": "invalid_value",
                    "line": 12,
                }
            },
        },
        "error": None,
    }


@pytest.mark.parametrize(("may_pass", "status_code"), [(False, 500), (True, 503)])
def test_the_engines_fault_is_a_server_error(may_pass: bool, status_code: int) -> None:
    record = error_record(Failure.of_server("broken", may_pass=may_pass), 0, "a", CONTEXT)

    response = record["response"]
    assert isinstance(response, dict)
    assert response["status_code"] == status_code
    assert response["body"]["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("reason", "code"), [(Unfinished.CANCELLED, "batch_cancelled"), (Unfinished.EXPIRED, "batch_expired")]
)
def test_an_unfinished_request_has_no_response(reason: Unfinished, code: str) -> None:
    record = unfinished_record(reason, 2, "a", CONTEXT)

    assert record["response"] is None
    assert record["error"] == {"code": code, "message": reason.message}
    assert has_failed(record)


def test_a_record_is_one_line_of_ascii() -> None:
    encoded = encode_record({"a": "\n\u2028é\U0001f600"})

    assert encoded.isascii()
    assert "\n" not in encoded
    assert json.loads(encoded) == {"a": "\n\u2028é\U0001f600"}


def test_a_record_never_holds_nan() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        encode_record({"a": float("nan")})


def test_only_status_200_is_a_success() -> None:
    assert not has_failed({"response": {"status_code": 200}, "error": None})
    assert has_failed({"response": {"status_code": 400}, "error": None})
    assert has_failed({"response": None, "error": {}})
