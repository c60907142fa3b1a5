"""What becomes of a message."""

from __future__ import annotations

from enum import Enum


class MessageEnd(Enum):
    """What becomes of a Celery message when its task is over."""

    DONE = "done"  # acknowledge it: its unit is finished, or somebody else's
    REQUEUE = "requeue"  # put it back: its unit, or the job it submits, waits for a worker
