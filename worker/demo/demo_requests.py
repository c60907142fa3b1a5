"""The sample the demo submits."""

from __future__ import annotations

import json
from collections.abc import Iterator

NUM_REQUESTS = 240
MAX_TOKENS = 24

_TASKS = (
    "You sort support tickets of a hardware shop. Answer with one of: delivery, invoice, defect, return, other. "
    "A late or missing parcel is a delivery ticket. A wrong sum or a missing receipt is an invoice ticket. A part that "
    "broke, leaks, rattles or does not start is a defect ticket. Whoever wants to send something back, for whatever "
    "reason, has a return ticket. If two fit, take the one the customer asks to have solved first.",
    "You write the date that a sentence speaks of as YYYY-MM-DD. Today is a Thursday, the fifth of March. A weekday "
    "without more means the next one. 'Last' means the one before today. If the sentence names no year, take this "
    "year. If it speaks of no date at all, answer none. Answer with the date alone, without a sentence around it.",
    "You condense a note of a service technician into one line for the customer: what was wrong, what was done, what "
    "the customer should do next. Leave out part numbers, internal names and prices. Write in the past tense, at most "
    "twenty words, and never promise anything the note does not promise itself.",
    "You check the arithmetic of a till receipt. Add the positions, apply the discount to the sum and compare with the "
    "total on the receipt. Answer ok if they agree to the cent, else answer with the difference, with a sign.",
)
_SUBJECTS = ("pump", "heater", "drill", "lamp", "valve", "saw", "fan", "sander", "kettle", "mower", "charger", "hose")
_EVENTS = (
    "arrived two days after the date on the invoice",
    "makes a grinding sound since the second of May",
    "was billed twice, once at 19.90 and once at 24.90",
    "should go back, the box has not been opened",
    "lost its seal; replaced it, ran it for ten minutes, dry",
)


def demo_lines() -> Iterator[dict[str, object]]:
    """OpenAI Batch lines: every fourth shares one of four system prompts, shuffled as a real file would be."""
    for number in range(NUM_REQUESTS):
        task = _TASKS[number % len(_TASKS)]
        subject = _SUBJECTS[number * 7 % len(_SUBJECTS)]
        event = _EVENTS[number * 3 % len(_EVENTS)]
        yield {
            "custom_id": f"ticket-{number:03d}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [
                    {"role": "system", "content": task},
                    {"role": "user", "content": f"Ticket {number}: the {subject} {event}."},
                ],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            },
        }


def demo_corpus() -> Iterator[str]:
    """The sample's text, to train the demo's tokenizer on."""
    for line in demo_lines():
        yield json.dumps(line)
    yield from _TASKS
