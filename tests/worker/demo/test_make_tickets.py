from __future__ import annotations

from itertools import islice

from worker.demo.tickets import COMPLAINTS, CUSTOMERS, PRODUCTS, URGENCY, Ticket, make_tickets


def _tickets(count: int, *, seed: int = 1, held_out: bool) -> list[Ticket]:
    return list(islice(make_tickets(seed, held_out=held_out), count))


def _complaint(ticket: Ticket) -> str:
    """Which complaint it makes: that whose longest fixed part stands in the text."""
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


def test_every_product_complaint_and_customer_of_held_out_tickets_is_known_from_training() -> None:
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
