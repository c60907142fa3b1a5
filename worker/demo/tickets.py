"""Makes support tickets, the job that asks about them, and the grades of its answers.

Some tickets are for training, others no training has seen. Every word is ours; nothing is from a real customer.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

HELD_OUT_OF = 8  # one in so many pairs of product and complaint, and of order numbers, is never trained on
OTHER_PRODUCT_SHARE = 0.2

# The model was trained with this very text: one word changed and its answers get worse.
SYSTEM_PROMPT = (
    "You read support tickets of a hardware shop and answer with five fields as JSON. "
    "category: delivery (late or lost), invoice (a wrong sum, a missing receipt), defect (broken), return (to be sent "
    "back) or question. product: what the ticket is about, not what it only mentions. order: all digits of the order "
    "number, no price, no days. customer: who wrote it. urgency: high (today, at once), low (it can wait) or normal."
)
# Longest answer: 32 tokens.
MAX_TOKENS = 48

PRODUCTS = (
    "battery", "blender", "cable", "camera", "charger", "compressor", "drill", "dryer", "fan", "freezer", "fridge",
    "grinder", "hammer", "headset", "heater", "hose", "iron", "kettle", "keyboard", "ladder", "lamp", "mixer",
    "monitor", "mower", "oven", "printer", "projector", "pump", "router", "sander", "saw", "scanner", "speaker",
    "toaster", "torch", "tripod", "vacuum", "valve", "washer", "wrench",
)  # fmt: skip

CUSTOMERS = (
    "Abel", "Adler", "Bauer", "Becker", "Berger", "Brandt", "Busch", "Carter", "Clark", "Cooper", "Davis", "Dietz",
    "Ellis", "Engel", "Evans", "Fischer", "Foster", "Fuchs", "Gibson", "Graf", "Haas", "Harris", "Hoffmann", "Hughes",
    "Jansen", "Jordan", "Keller", "Kelly", "Koch", "Lang", "Lewis", "Martin", "Meyer", "Murphy", "Neumann", "Otto",
    "Parker", "Peters", "Quinn", "Richter", "Roth", "Schmidt", "Taylor", "Vogel", "Wagner", "Walker", "Weber", "Young",
)  # fmt: skip

# Category -> what is said; {product} goes into the answer, {price}, {right_price} and {days} must not.
COMPLAINTS: Mapping[str, tuple[str, ...]] = {
    "delivery": (
        "My {product} has not arrived.",
        "The parcel with the {product} is late.",
        "Where is my {product}?",
        "I am still waiting for the {product}.",
        "The carrier lost the {product}.",
        "The {product} went to the wrong address.",
        "The tracking of my {product} has stopped.",
        "The {product} should have been here {days} days ago.",
    ),
    "invoice": (
        "I was billed twice for the {product}.",
        "The sum on the invoice for the {product} is wrong.",
        "I paid {price} too much for the {product}.",
        "The receipt for the {product} is missing.",
        "You charged {price} instead of {right_price} for the {product}.",
        "The discount on the {product} was not applied.",
        "The tax on the {product} is wrong.",
        "My card was charged again for the {product}.",
    ),
    "defect": (
        "My {product} does not start.",
        "The {product} leaks.",
        "The {product} makes a grinding sound.",
        "The {product} broke after {days} days.",
        "Smoke comes out of the {product}.",
        "The {product} stopped working.",
        "A part of the {product} is loose.",
        "The {product} gets too hot.",
    ),
    "return": (
        "I want to send the {product} back.",
        "The {product} is too small, please take it back.",
        "I would like my money back for the {product}.",
        "How do I return the {product}?",
        "Please send me a return label for the {product}.",
        "I have changed my mind about the {product}.",
        "I ordered the wrong {product} and want to exchange it.",
        "The {product} is still in its box, may it go back?",
    ),
    "question": (
        "Which oil does the {product} need?",
        "How do I clean the {product}?",
        "Is there a manual for the {product}?",
        "Can I use the {product} outside?",
        "How long may the {product} run?",
        "Does the {product} come with a spare part?",
        "How loud is the {product}?",
        "Is the {product} safe for children?",
    ),
}
OTHER_PRODUCT = ("Nothing is wrong with the {other}.", "I have no problem with the {other}.")
ORDER = (
    "Order {order}.",
    "My order number is {order}.",
    "It was order {order}.",
    "Order number: {order}.",
    "This is about order {order}.",
    "See order #{order}.",
)
URGENCY: Mapping[str, tuple[str, ...]] = {
    "high": (
        "I need this solved today.",
        "This is urgent.",
        "Please answer at once.",
        "We cannot work without it.",
        "I cannot wait any longer.",
        "It is an emergency.",
    ),
    "normal": ("", "Please let me know.", "I look forward to your answer."),
    "low": (
        "There is no hurry.",
        "Take your time.",
        "It can wait until next week.",
        "Answer whenever you like.",
        "It is not important.",
        "No need to answer soon.",
    ),
}
GREETINGS = ("", "Hello.", "Hi.", "Dear team.", "Good morning.")
NAME_FIRST = ("This is {customer}.", "My name is {customer}.", "{customer} here.")
NAME_LAST = ("Regards, {customer}", "Thank you, {customer}", "Best wishes, {customer}", "Yours, {customer}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a customer wrote, and what a right answer says about it."""

    text: str
    fields: Mapping[str, str]  # category, product, order, customer, urgency: in the order of the schema


def is_held_out(*parts: str) -> bool:
    """Whether this combination is kept from training: by a hash of it, so that nothing needs to be stored."""
    return crc32("\0".join(parts).encode()) % HELD_OUT_OF == 0


def make_tickets(seed: int, *, held_out: bool) -> Iterator[Ticket]:
    """Tickets without end, the same for the same seed.

    A held-out ticket has a pair of product and complaint and an order number that both occur in no ticket for training.
    """
    rng = random.Random(seed)
    while True:
        yield _make_ticket(rng, held_out)


def numbered_tickets(seed: int, count: int) -> dict[str, Ticket]:
    """Held-out tickets by custom_id, ticket-000 onwards."""
    return {f"ticket-{n:03d}": ticket for n, ticket in enumerate(islice(make_tickets(seed, held_out=True), count))}


def _make_ticket(rng: random.Random, held_out: bool) -> Ticket:
    category, complaint, product = _subject(rng, held_out)
    urgency = rng.choice(tuple(URGENCY))
    order, customer = _order(rng, held_out), rng.choice(CUSTOMERS)
    numbers = {"days": rng.randint(2, 30), "price": _price(rng), "right_price": _price(rng)}
    sentences = [
        complaint.format(product=product, **numbers),
        rng.choice(ORDER).format(order=order),
        rng.choice(URGENCY[urgency]),
    ]
    if rng.random() < OTHER_PRODUCT_SHARE:
        other = rng.choice([name for name in PRODUCTS if name != product])
        sentences.append(rng.choice(OTHER_PRODUCT).format(other=other))
    rng.shuffle(sentences)
    if rng.random() < 0.5:
        sentences.insert(0, rng.choice(NAME_FIRST).format(customer=customer))
    else:
        sentences.append(rng.choice(NAME_LAST).format(customer=customer))
    text = " ".join(filter(None, (rng.choice(GREETINGS), *sentences)))
    fields = {"category": category, "product": product, "order": order, "customer": customer, "urgency": urgency}
    return Ticket(text, fields)


def _subject(rng: random.Random, held_out: bool) -> tuple[str, str, str]:
    """Category, complaint and product."""
    while True:
        category = rng.choice(tuple(COMPLAINTS))
        complaint, product = rng.choice(COMPLAINTS[category]), rng.choice(PRODUCTS)
        if is_held_out(complaint, product) == held_out:
            return category, complaint, product


def _order(rng: random.Random, held_out: bool) -> str:
    """An order number of five or six digits."""
    while True:
        order = str(rng.randrange(10_000, 100_000) if rng.random() < 0.5 else rng.randrange(100_000, 1_000_000))
        if is_held_out(order) == held_out:
            return order


def _price(rng: random.Random) -> str:
    return f"{rng.randint(5, 99)}.{rng.randint(0, 99):02}"


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
