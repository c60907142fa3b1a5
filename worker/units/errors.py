"""What can become of a unit's work.

Exception
  UnitFailed   it raised; logged, with the unit's ids, and given back: Celery need only know that the task is over
"""

from __future__ import annotations


class UnitFailed(Exception):
    """The work on a unit raised `cause`, of which only the type is kept.

    To be raised `from None`: Celery sends the whole traceback to Flower, and a cause's text may be a user's words.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(type(cause).__name__)
