"""A command that is not imported yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command is, and what the list of commands says of it without importing it."""

    module: str  # holds a click.Command named `command`
    summary: str
