"""A generated sequence, as far as records need to know it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from worker.records.chosen_token import ChosenToken


class FinishedCompletion(Protocol):
    """One of a request's n generated sequences."""

    @property
    def index(self) -> int:
        """0 .. n - 1."""
        ...

    @property
    def text(self) -> str:
        """Its text, without the stop string."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Everything generated, the ending token included."""
        ...

    @property
    def finish_reason(self) -> Enum:
        """Why it ended; its value is the API's word."""
        ...

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token id that ended it."""
        ...

    @property
    def logprobs(self) -> Sequence[ChosenToken] | None:
        """One a token of token_ids; None unless asked for."""
        ...
