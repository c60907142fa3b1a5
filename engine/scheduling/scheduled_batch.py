"""What one step runs."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.scheduled_item import ScheduledItem


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What one step runs, on the host and without tensors."""

    items: tuple[ScheduledItem, ...]  # not empty; each sequence at most once

    @property
    def num_tokens(self) -> int:
        """Tokens the step runs."""
        return sum(item.num_scheduled_tokens for item in self.items)
