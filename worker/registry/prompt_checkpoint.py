"""A checkpoint on its way to Redis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptCheckpoint:
    """How far an unfinished prompt has come; it replaces an earlier one, and the prompt's record replaces it."""

    index: int
    checkpoint: str  # JSON, ASCII

    @property
    def num_bytes(self) -> int:
        """Its size in Redis."""
        return len(self.checkpoint)
