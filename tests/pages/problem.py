"""Something that a document says and that is not so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Problem:
    """A name that does not exist, and where it stands."""

    document: str
    line: int
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.name}: {self.why}"
