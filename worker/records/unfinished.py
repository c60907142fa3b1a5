"""Why a request was not carried out."""

from __future__ import annotations

from enum import StrEnum


class Unfinished(StrEnum):
    """Why a request was not carried out although nothing is wrong with it. Values are OpenAI's codes."""

    CANCELLED = "batch_cancelled"
    EXPIRED = "batch_expired"

    @property
    def message(self) -> str:
        """What the record says."""
        if self is Unfinished.CANCELLED:
            return "This request was not executed because the batch was cancelled."
        return "This request could not be executed before the completion window expired."
