"""A file of request lines that is to be read."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InputFile:
    """Opened when its turn comes: of ten thousand files one is open."""

    name: str  # its path, - for standard input
    open: Callable[[], io.BufferedReader]
    is_complete: bool  # a file on disk; False: a pipe or a terminal, whose writer may be slow
