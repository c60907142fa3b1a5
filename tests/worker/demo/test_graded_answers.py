from __future__ import annotations

import json
from typing import Any

import pytest

from worker.demo.tickets import GradedAnswers, Ticket

TICKET = Ticket("The pump leaks. Order 12345. Roth", {"category": "defect", "product": "pump"})
RIGHT = '{"category":"defect","product":"pump"}'


def _record(custom_id: str, answer: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer}
    return {"custom_id": custom_id, "response": {"body": {"choices": [{"message": message}]}}}


def test_an_answer_is_right_when_every_field_is() -> None:
    graded = GradedAnswers.of_records({"a": TICKET}, [_record("a", json.dumps(json.loads(RIGHT), indent=2))])

    assert (graded.accuracy, graded.num_exact, graded.wrong) == (1.0, 1, [])
    assert graded.num_right == {"category": 1, "product": 1}


@pytest.mark.parametrize(
    ("answer", "num_right"),
    [
        ('{"category":"defect","product":"saw"}', {"category": 1, "product": 0}),
        ('{"category":"defect"}', {"category": 1, "product": 0}),
        ('{"category":"defect","product":"pump","order":"1"}', {"category": 1, "product": 1}),
        ('{"category":"defect","product":"pu', {"category": 0, "product": 0}),
        ('["defect","pump"]', {"category": 0, "product": 0}),
        ("", {"category": 0, "product": 0}),
    ],
)
def test_anything_else_is_wrong(answer: str, num_right: dict[str, int]) -> None:
    graded = GradedAnswers.of_records({"a": TICKET}, [_record("a", answer)])

    assert graded.accuracy == 0.0
    assert {name: graded.num_right[name] for name in num_right} == num_right
    assert graded.wrong == [(TICKET, answer)]


def test_an_error_and_a_missing_record_are_wrong_answers_and_other_records_are_none() -> None:
    error = {"custom_id": "b", "response": {"body": {"error": {"message": "broken"}}}}
    other = {"custom_id": "text", "response": {"body": {"choices": [{"text": "a completion"}]}}}

    graded = GradedAnswers.of_records(
        dict.fromkeys("abcd", TICKET), [_record("d", RIGHT), error, _record("a", RIGHT), other]
    )

    assert (graded.num_tickets, graded.num_exact, graded.accuracy) == (4, 2, 0.5)
