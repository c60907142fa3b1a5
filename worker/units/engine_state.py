"""What decides whether a unit may be taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineState:
    """Asked of the engine by whoever takes units."""

    is_well: Callable[[], bool]  # its step has not lasted suspiciously long
    is_empty: Callable[[], bool]  # it holds no request, nor is in a step for one that was given up
