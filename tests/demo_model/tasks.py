"""The three tasks, and an exercise. Held out are combinations, never words: every test can be passed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import date, timedelta

from tests.demo_model.example import Example
from tests.demo_model.task import Task
from worker.demo.tickets import CUSTOMERS, PRODUCTS, SYSTEM_PROMPT, is_held_out, make_tickets

DATE_PROMPT = "Write the date as YYYY-MM-DD and nothing else. The day comes before the month unless the year is first."
SUM_PROMPT = "Add the two numbers and write the sum and nothing else."
COPY_PROMPT = "Repeat the text and write nothing else."

FIRST_DAY, NUM_DAYS = date(1970, 1, 1), 80 * 365
DATE_FORMS = (
    "{day} {month} {year}",
    "{month} {day}, {year}",
    "the {nth} of {month} {year}",
    "{day} {short} {year}",
    "{day:02}.{number:02}.{year}",
    "{year}/{number}/{day}",
)
DATE_FRAMES = ("{}", "It happened on {}.", "The meeting is on {}.", "Due: {}")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
SUM_FORMS = ("{a} + {b}", "What is {a} plus {b}?", "One costs {a}, the other {b}. How much are both?")


def all_tasks() -> tuple[Task, ...]:
    """Tickets, dates, sums, and copying for its own sake: attention learns it there first, and the others need it."""
    return (
        Task("tickets", SYSTEM_PROMPT, ticket_examples, batch_size=16),
        Task("dates", DATE_PROMPT, date_examples, batch_size=24),
        Task("sums", SUM_PROMPT, sum_examples, batch_size=48),
        Task("copies", COPY_PROMPT, copy_examples, batch_size=24, is_exercise=True),
    )


def ticket_examples(seed: int, held_out: bool) -> Iterator[Example]:
    """Held out: pairs of product and complaint, and order numbers."""
    for ticket in make_tickets(seed, held_out=held_out):
        yield Example(ticket.text, json.dumps(ticket.fields, separators=(",", ":")))


def date_examples(seed: int, held_out: bool) -> Iterator[Example]:
    """Held out: one day in eight, in all of its forms."""
    rng = random.Random(seed)
    while True:
        day = FIRST_DAY + timedelta(days=rng.randrange(NUM_DAYS))
        if is_held_out(day.isoformat()) == held_out:
            month = MONTHS[day.month - 1]
            said = rng.choice(DATE_FORMS).format(
                day=day.day, nth=_ordinal(day.day), month=month, short=month[:3], number=day.month, year=day.year
            )
            yield Example(rng.choice(DATE_FRAMES).format(said), day.isoformat())


def sum_examples(seed: int, held_out: bool) -> Iterator[Example]:
    """Two numbers from 0 to 99, of one digit more often than chance has it. Held out: one pair in eight."""
    rng = random.Random(seed)
    while True:
        a, b = (rng.randrange(rng.choice((10, 100, 100))) for _ in range(2))
        if is_held_out(str(a), str(b)) == held_out:
            yield Example(rng.choice(SUM_FORMS).format(a=a, b=b), str(a + b))


def copy_examples(seed: int, held_out: bool) -> Iterator[Example]:
    """Three parts, each a number of up to eight digits, a product or a customer. Held out: one text in eight."""
    rng = random.Random(seed)
    while True:
        parts = [
            rng.choice((str(rng.randrange(10 ** rng.randint(1, 8))), rng.choice(PRODUCTS), rng.choice(CUSTOMERS)))
            for _ in range(3)
        ]
        text = " ".join(parts)
        if is_held_out(text) == held_out:
            yield Example(text, text)


def _ordinal(number: int) -> str:
    suffix = "th" if number in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
