"""Records of one read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResultPage:
    """Some records of a job, and where to read on."""

    records: Sequence[bytes]
    cursor: int  # of the next page, see JobQueries.page
    is_last: bool  # every record so far is read
    has_ended: bool  # the job was over when this was asked: no more will come
