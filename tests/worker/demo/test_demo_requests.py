from __future__ import annotations

import json

import jsonschema

from settings import LimitSettings
from worker.demo.tickets import answer_schema, demo_lines, numbered_tickets
from worker.lines.parse import parse_request_line

TICKETS = numbered_tickets(3, 50)


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
