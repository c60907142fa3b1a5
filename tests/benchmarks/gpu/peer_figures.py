"""What the peer did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerFigures:
    """What it did in the time it had."""

    version: str
    attention: str
    seconds: float
    output_tokens: int
    finished_requests: int
    num_requests: int

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prefill included."""
        return self.output_tokens / self.seconds
