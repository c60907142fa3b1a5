"""What bounds a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds a step. `max_num_batched_tokens >= max_num_seqs`, so that every running sequence can decode."""

    max_num_seqs: int  # sequences that hold blocks
    max_num_batched_tokens: int  # tokens of one step
    unified_prefill: bool  # prefill and decode share a step

    @property
    def max_examined(self) -> int:
        """Waiting sequences looked at in one step: bounds the scan while many wait for one prefix."""
        return 4 * self.max_num_seqs + 64
