"""What can become of a unit's work.

Exception
  UnitFailed   it raised; logged, with the unit's ids, and given back: Celery need only know that the task is over
"""

from __future__ import annotations


class UnitFailed(Exception):
    """The work on a unit raised `__cause__`; its text is only the type, since Celery logs it and sends it to Flower."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(type(cause).__name__)
