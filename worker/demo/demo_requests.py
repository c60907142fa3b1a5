"""The job the demo submits: one system prompt, many tickets, answers in the form of one schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from worker.demo.ticket import Ticket
from worker.demo.ticket_words import COMPLAINTS, URGENCY

# The model was trained with this very text: one word changed and its answers get worse.
SYSTEM_PROMPT = (
    "You read support tickets of a hardware shop and answer with five fields as JSON. "
    "category: delivery (late or lost), invoice (a wrong sum, a missing receipt), defect (broken), return (to be sent "
    "back) or question. product: what the ticket is about, not what it only mentions. order: all digits of the order "
    "number, no price, no days. customer: who wrote it. urgency: high (today, at once), low (it can wait) or normal."
)
# Longest answer: 32 tokens.
MAX_TOKENS = 48


def answer_schema() -> dict[str, object]:
    """What an answer looks like. Product, order and customer are free: the model must find them in the ticket."""
    fields = {
        "category": {"type": "string", "enum": list(COMPLAINTS)},
        "product": {"type": "string"},
        "order": {"type": "string", "pattern": "^[0-9]{5,6}$"},
        "customer": {"type": "string"},
        "urgency": {"type": "string", "enum": list(URGENCY)},
    }
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def demo_lines(tickets: Mapping[str, Ticket]) -> Iterator[dict[str, object]]:
    """OpenAI Batch lines of tickets by custom_id."""
    schema = {"name": "ticket", "schema": answer_schema(), "strict": True}
    for custom_id, ticket in tickets.items():
        yield {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [
                    {"role": "system", "content": SYSTEM_PROMPT},
                    {"role": "user", "content": ticket.text},
                ],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "response_format": {"type": "json_schema", "json_schema": schema},
            },
        }
