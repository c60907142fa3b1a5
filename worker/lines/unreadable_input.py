"""An input that breaks off."""

from __future__ import annotations


class UnreadableInput(OSError):
    """A file of request lines, named in the message, that cannot be opened or read to its end."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
