"""How right a job's answers are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.demo.ticket import Ticket


@dataclass(frozen=True)
class GradedAnswers:
    """The answers to some tickets, compared with what is known about them."""

    num_tickets: int
    num_exact: int  # right in every field, and with no other
    num_right: Mapping[str, int]  # by field
    wrong: Sequence[tuple[Ticket, str]]  # the others, with what was answered

    @classmethod
    def of_records(cls, tickets: Mapping[str, Ticket], records: Iterable[Mapping[str, Any]]) -> GradedAnswers:
        """Grade the records of tickets by custom_id; other records do not count.

        A ticket without a record, an error record and an answer that is no JSON are wrong.
        """
        answers = {r["custom_id"]: answer_text(r) for r in records if r["custom_id"] in tickets}
        right: Counter[str] = Counter()
        wrong: list[tuple[Ticket, str]] = []
        for custom_id, ticket in tickets.items():
            answer = answers.get(custom_id, "")
            found = _fields(answer)
            right.update(name for name, value in ticket.fields.items() if found.get(name) == value)
            if found != ticket.fields:
                wrong.append((ticket, answer))
        return cls(len(tickets), len(tickets) - len(wrong), right, wrong)

    @property
    def accuracy(self) -> float:
        """Share of the tickets right in every field, 0 to 1."""
        return self.num_exact / self.num_tickets


def answer_text(record: Mapping[str, Any]) -> str:
    """What the model wrote; nothing in an error record."""
    body = record["response"]["body"]
    return str(body["choices"][0]["message"]["content"]) if "choices" in body else ""


def _fields(answer: str) -> dict[str, object]:
    try:
        found = json.loads(answer)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
