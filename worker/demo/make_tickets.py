"""Makes support tickets: some for training, others that no training has seen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from zlib import crc32

from worker.demo.ticket import Ticket
from worker.demo.ticket_words import (
    COMPLAINTS,
    CUSTOMERS,
    GREETINGS,
    NAME_FIRST,
    NAME_LAST,
    ORDER,
    OTHER_PRODUCT,
    PRODUCTS,
    URGENCY,
)

HELD_OUT_OF = 8  # one in so many pairs of product and complaint, and of order numbers, is never trained on
OTHER_PRODUCT_SHARE = 0.2


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
