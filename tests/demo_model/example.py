"""A question with its right answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """What the user says, and all of what the model must say."""

    user: str
    answer: str
