"""What the engine's thread tells the others about its engine."""

from __future__ import annotations

import time

from engine.engine import EngineStats
from worker.metrics.catalogue import STEP_SECONDS, STEP_SEQUENCES, STEP_TOKENS
from worker.metrics.step_histogram import StepHistogram

# At least, between two EngineStats of an engine that works: one costs 11 us (85 with cold caches), all else 2.
PUBLISH_INTERVAL_S = 0.25


class EngineMeter:
    """The engine's figures as of a moment ago, and how long and how large its steps were.

    Only the engine's thread writes. Others read values that do not change: nobody else touches the engine for a figure.
    """

    def __init__(self) -> None:
        self._stats: EngineStats | None = None
        self._published_at = 0.0
        self.step_seconds = StepHistogram(STEP_SECONDS)
        self.step_sequences = StepHistogram(STEP_SEQUENCES)
        self.step_tokens = StepHistogram(STEP_TOKENS)

    @property
    def stats(self) -> EngineStats | None:
        """As they were last published; None before the engine is loaded."""
        return self._stats

    @property
    def is_due(self) -> bool:
        """Whether figures should be published again, should the engine go on to work."""
        return time.monotonic() - self._published_at >= PUBLISH_INTERVAL_S

    def publish(self, stats: EngineStats) -> None:
        """These are the engine's figures now."""
        self._stats = stats
        self._published_at = time.monotonic()

    def step(self, duration_s: float, size: tuple[int, int]) -> None:
        """A call of the engine's `step` took so long and began a step of so many sequences and tokens."""
        self.step_seconds.add(duration_s)
        num_sequences, num_tokens = size
        if num_sequences:  # else it only took the answers of the step before
            self.step_sequences.add(num_sequences)
            self.step_tokens.add(num_tokens)
