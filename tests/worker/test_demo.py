"""The demo: its tickets, its requests, and answers graded against the right ones."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import jsonschema
import pytest

from settings import LimitSettings
from worker.demo.tickets import (
    COMPLAINTS,
    CUSTOMERS,
    PRODUCTS,
    URGENCY,
    GradedAnswers,
    Ticket,
    answer_schema,
    demo_lines,
    make_tickets,
    numbered_tickets,
)
from worker.lines.parse import parse_request_line

TICKETS = numbered_tickets(3, 50)

TICKET = Ticket("The pump leaks. Order 12345. Roth", {"category": "defect", "product": "pump"})
RIGHT = '{"category":"defect","product":"pump"}'


def _tickets(count: int, *, seed: int = 1, held_out: bool) -> list[Ticket]:
    return list(islice(make_tickets(seed, held_out=held_out), count))


def _complaint(ticket: Ticket) -> str:
    """The complaint whose longest fixed part stands in the text."""
    [found] = {
        complaint
        for complaint in COMPLAINTS[ticket.fields["category"]]
        if all(part in ticket.text for part in _fixed_parts(complaint, ticket.fields["product"]))
    }
    return found


def _fixed_parts(complaint: str, product: str) -> list[str]:
    text = complaint.replace("{product}", product)
    for name in ("{price}", "{right_price}", "{days}"):
        text = text.replace(name, "\0")
    return text.split("\0")


def test_a_seed_gives_the_same_tickets_each_time() -> None:
    assert _tickets(20, held_out=True) == _tickets(20, held_out=True)
    assert _tickets(20, held_out=True) != _tickets(20, seed=2, held_out=True)


def test_what_is_held_out_is_in_no_ticket_for_training() -> None:
    trained, held_out = _tickets(5000, held_out=False), _tickets(500, held_out=True)

    assert not {t.fields["order"] for t in trained} & {t.fields["order"] for t in held_out}
    pairs = [{(_complaint(t), t.fields["product"]) for t in tickets} for tickets in (trained, held_out)]
    assert not pairs[0] & pairs[1]
    assert len(pairs[0]) > 1300  # of 40 complaints x 40 products, seven eighths
    assert len(pairs[1]) > 150


def test_every_word_of_held_out_tickets_is_known_from_training() -> None:
    trained, held_out = _tickets(5000, held_out=False), _tickets(500, held_out=True)

    for name, values in (("product", PRODUCTS), ("customer", CUSTOMERS)):
        assert {t.fields[name] for t in held_out} <= {t.fields[name] for t in trained} == set(values)
    assert {_complaint(t) for t in held_out} <= {_complaint(t) for t in trained}


def test_what_is_to_be_copied_stands_in_the_text() -> None:
    for ticket in _tickets(500, held_out=True):
        for name in ("product", "order", "customer"):
            assert ticket.fields[name] in ticket.text
        assert ticket.fields["order"].isdigit()
        assert len(ticket.fields["order"]) in (5, 6)


def test_urgency_is_said_unless_it_is_normal() -> None:
    for ticket in _tickets(300, held_out=True):
        said = {urgency for urgency, phrases in URGENCY.items() if any(p and p in ticket.text for p in phrases)}
        assert said | {"normal"} == {ticket.fields["urgency"], "normal"}


def test_every_line_is_accepted_and_asks_for_the_schema() -> None:
    for number, line in enumerate(demo_lines(TICKETS)):
        parsed = parse_request_line(json.dumps(line).encode(), number, LimitSettings())
        assert parsed.custom_id == f"ticket-{number:03d}"


def test_all_lines_begin_with_the_same_system_prompt() -> None:
    systems = {json.dumps(line["body"]["messages"][0]) for line in demo_lines(TICKETS)}  # type: ignore[index]  # JSON

    assert len(systems) == 1


def test_right_answers_satisfy_the_schema_and_others_do_not() -> None:
    validator = jsonschema.Draft202012Validator(answer_schema())
    for ticket in TICKETS.values():
        assert validator.is_valid(dict(ticket.fields))
        assert not validator.is_valid({**ticket.fields, "urgency": "whenever"})
        assert not validator.is_valid({**ticket.fields, "order": "12"})
        assert not validator.is_valid({**ticket.fields, "note": ""})


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


def test_errors_and_missing_records_are_wrong_and_others_do_not_count() -> None:
    error = {"custom_id": "b", "response": {"body": {"error": {"message": "broken"}}}}
    other = {"custom_id": "text", "response": {"body": {"choices": [{"text": "a completion"}]}}}

    graded = GradedAnswers.of_records(
        dict.fromkeys("abcd", TICKET), [_record("d", RIGHT), error, _record("a", RIGHT), other]
    )

    assert (graded.num_tickets, graded.num_exact, graded.accuracy) == (4, 2, 0.5)
