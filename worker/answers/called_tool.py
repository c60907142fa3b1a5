"""A tool call that was read out of an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CalledTool:
    """Which function, and with what."""

    name: str  # one that the request offered
    arguments: str  # a JSON object, as the model spelled it
