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
    def max_overtakes(self) -> int:
        """Later arrivals of its tenant that may pass a waiting sequence: two windows of 8 x max_num_seqs, about what
        one sweep meets while it is fed.
        """
        return 16 * self.max_num_seqs

    @property
    def quantum_tokens(self) -> int:
        """How far a tenant may get ahead before another has its turn; measured in engine/DESIGN.md."""
        return max(self.max_num_batched_tokens // 4, 1)
