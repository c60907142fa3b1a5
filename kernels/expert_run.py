"""The rows of one expert."""

from __future__ import annotations

from typing import NamedTuple


class ExpertRun(NamedTuple):
    """Neighbouring rows of an `ExpertLayout` that are those of one expert."""

    expert: int
    num_rows: int  # at least 1
