"""How single tokens are written."""

from __future__ import annotations

from typing import Protocol


class TokenSpelling(Protocol):
    """How single tokens are written; the engine's tokeniser satisfies it."""

    def token_text(self, token_id: int) -> str:
        """The token as text, U+FFFD where it is no whole character."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The token as the bytes it stands for."""
        ...
