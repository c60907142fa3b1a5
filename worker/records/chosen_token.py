"""A generated token, as far as records need to know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ChosenToken(Protocol):
    """One generated token and its natural log-probability."""

    @property
    def token_id(self) -> int:
        """The id drawn."""
        ...

    @property
    def logprob(self) -> float:
        """Its log-probability."""
        ...

    @property
    def top(self) -> Sequence[tuple[int, float]]:
        """(token id, logprob) of the alternatives asked for, best first."""
        ...
