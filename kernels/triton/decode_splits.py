"""How a decode step cuts its rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeSplits:
    """How a decode step cuts its rows: row by row, since a captured launch knows no lengths, only a bound of them."""

    num_splits: int  # programs along a row's keys; those past the last split of a row return at once
    # A row of n keys has splits of cdiv(n, num_splits) keys, rounded up to SPLIT_MULTIPLE, but not fewer than these.
    min_split_tokens: int  # a multiple of SPLIT_MULTIPLE
