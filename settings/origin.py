"""Where one effective value came from."""

from __future__ import annotations

from dataclasses import dataclass

from settings.source import Source


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one effective value came from, and under which name, so that a later error can say so."""

    source: Source
    written: str
