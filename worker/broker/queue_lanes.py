"""The queue, and the lists it is made of."""

from __future__ import annotations

QUEUE = "millrace"

# A message of priority p waits in the lane of the greatest step that is not above p; 0 is taken first.
PRIORITY_STEPS = (0, 3, 6, 9)
# Plans go first, whatever their job's priority: a plan is short, and behind messages of shards that wait for busy slots
# it would be hidden for as long as those run.
PLAN_PRIORITY = 0
_SEPARATOR = "\x06\x16"  # kombu's, between the queue's name and the step


def steps_by_priority() -> list[int]:
    """For priorities 0 .. 9, the step of the lane in which their messages wait."""
    return [max(step for step in PRIORITY_STEPS if step <= priority) for priority in range(10)]


def lanes_by_priority() -> list[str]:
    """For priorities 0 .. 9, the Redis list in which their messages wait."""
    return [f"{QUEUE}{_SEPARATOR}{step}" if step else QUEUE for step in steps_by_priority()]
