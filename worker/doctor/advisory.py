"""A security release of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Series = tuple[int, int]  # such as (7, 4)


@dataclass(frozen=True, slots=True)
class Advisory:
    """Holes that one security release closed, in each series that got one."""

    cves: tuple[str, ...]
    published: str  # YYYY-MM-DD
    what: str  # who may do what
    fixed: Mapping[Series, int]  # series -> its first version without them: {(7, 4): 6} is 7.4.6
    since: Series = (0, 0)  # older series never had them

    def affects(self, number: tuple[int, int, int]) -> bool:
        """Whether this version has them. A series beyond the newest one fixed was born without."""
        series, patch = number[:2], number[2]
        if series < self.since:
            return False
        return patch < self.fixed[series] if series in self.fixed else series < max(self.fixed)
