"""A support ticket whose fields are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a customer wrote, and what a right answer says about it."""

    text: str
    fields: Mapping[str, str]  # category, product, order, customer, urgency: in the order of the schema
