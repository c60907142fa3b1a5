"""The accepted forms of a setting, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted forms in words, where type and bounds do not say them: a mark on a setting's declaration."""

    text: str
