"""A record on its way to Redis."""

from __future__ import annotations

from dataclasses import dataclass

from worker.registry.outcome import Outcome


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt's record with what the job's counters need of it."""

    index: int
    outcome: Outcome
    record: str  # JSON, ASCII
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    resumed_tokens: int = 0  # of output_tokens: taken over from a checkpoint, not generated again
    reasoning_tokens: int = 0  # of output_tokens: thinking before the answer

    @property
    def num_bytes(self) -> int:
        """Its size in Redis."""
        return len(self.record)
