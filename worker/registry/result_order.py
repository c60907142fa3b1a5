"""The order in which a job's records are read."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class ResultOrder(StrEnum):
    """Accepted by `results` of the clients and by `millrace results --order`."""

    COMPLETION = "completion"  # as they were written
    INPUT = "input"  # as the request lines stood

    @classmethod
    def checked(cls, order: str, cursor: int) -> Self:
        """`order`, given with a cursor that can be read from. Raises ValueError naming what is accepted."""
        if order not in tuple(cls):
            raise ValueError(f"order is {order!r}; accepted: {', '.join(cls)}")
        if type(cursor) is not int or cursor < 0:  # a bool is no number
            raise ValueError(f"cursor is {cursor!r}; accepted: 0 or more, the number of records seen")
        return cls(order)
