"""One metric, declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as it stands in /metrics: its name has the unit, a counter's ends in `_total`."""

    name: str
    kind: Kind
    help: str  # one line
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # a histogram's upper bounds, rising, without +Inf
