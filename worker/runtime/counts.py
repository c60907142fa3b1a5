"""Counts this worker's units, prompts and engine steps, and reads the queue's figures now and then."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product

import redis

from engine.stats import EngineStats
from settings import WorkerSettings
from worker.metrics.catalogue import ATTEMPTS, OUTCOMES, STEP_SECONDS, STEP_SEQUENCES, STEP_TOKENS, UNIT_ENDS, UNITS
from worker.registry.keys import Keys
from worker.registry.leases import Claim, PromptRecord, UnitLeases
from worker.registry.lifecycle import PutStatus, RunMode
from worker.registry.queues import QueueFigures, QueueReading
from worker.runtime.held_units import HeldUnit

# Least time between two EngineStats of a working engine: one takes 11 us (85 with cold caches), the rest of a step's
# bookkeeping 2.
PUBLISH_INTERVAL_S = 0.25

logger = logging.getLogger(__name__)


class UnitCounts:
    """Counters since this worker started, each with all its labels from the start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.prompts = Counter(dict.fromkeys(OUTCOMES, 0))  # records written, by outcome
        self.tokens = Counter(prompt=0, cached=0, output=0, resumed=0, reasoning=0)  # of those prompts
        self.attempts = Counter(dict.fromkeys(product(UNITS, ATTEMPTS), 0))  # units claimed, by kind and attempt
        self.ends = Counter(dict.fromkeys(product(UNITS, UNIT_ENDS), 0))  # units let go of, by kind and why

    def add_attempt(self, held: HeldUnit) -> None:
        """Count a unit that was just claimed, by its attempt."""
        attempt = ATTEMPTS[min(held.claim.attempts, len(ATTEMPTS) - 1)]
        with self._lock:
            self.attempts[held.claim.ref.kind, attempt] += 1

    def add_records(self, records: Iterable[PromptRecord]) -> None:
        """Count records that Redis has taken, and their tokens."""
        with self._lock:
            for record in records:
                self.prompts[record.outcome.value] += 1
                self.tokens["prompt"] += record.prompt_tokens
                self.tokens["cached"] += record.cached_tokens
                self.tokens["output"] += record.output_tokens
                self.tokens["resumed"] += record.resumed_tokens
                self.tokens["reasoning"] += record.reasoning_tokens

    def add_end(self, held: HeldUnit) -> None:
        """Count a unit that was let go of, by why."""
        with self._lock:
            self.ends[held.claim.ref.kind, _end(held)] += 1


def _end(held: HeldUnit) -> str:
    reason = held.stop_reason or held.claim.mode.stop_reason
    return "finished" if held.is_written or reason is None else reason.metric_label


class CountedLeases(UnitLeases):
    """A worker's leases, which count records once Redis has said that it took them."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        owner: str,
        settings: WorkerSettings,
        models: Sequence[str],
        counts: UnitCounts,
    ) -> None:
        super().__init__(client, keys, owner=owner, settings=settings, models=models)
        self._counts = counts

    def put(self, claim: Claim, records: Sequence[PromptRecord], *, at_end: bool = False) -> tuple[PutStatus, RunMode]:
        """Write records, see UnitLeases.put, and count them."""
        status, mode = super().put(claim, records, at_end=at_end)
        if status not in (PutStatus.FENCED, PutStatus.REWOUND):
            self._counts.add_records(records)
        return status, mode


class StepHistogram:
    """Counts values by size. One thread adds; what others read meanwhile may lack the last value.

    Unlike prometheus_client's Histogram it takes no lock.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds  # upper ones, rising
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0  # of all values

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Each upper bound in Prometheus's spelling, `+Inf` last, with how many values are at or below it."""
        names = [*map(str, self._bounds), "+Inf"]
        return zip(names, accumulate(list(self._counts)), strict=True)


class EngineMeter:
    """The engine's figures as of a moment ago, and how long and how large its steps were.

    Only the engine's thread writes; others read the last published figures instead of touching the engine.
    """

    def __init__(self) -> None:
        self.stats: EngineStats | None = None  # as last published; None before the engine is loaded
        self._published_at = 0.0
        self.step_seconds = StepHistogram(STEP_SECONDS)
        self.step_sequences = StepHistogram(STEP_SEQUENCES)
        self.step_tokens = StepHistogram(STEP_TOKENS)

    @property
    def is_due(self) -> bool:
        """Whether a working engine should publish its figures again."""
        return time.monotonic() - self._published_at >= PUBLISH_INTERVAL_S

    def publish(self, stats: EngineStats) -> None:
        """Show the engine's present figures."""
        self.stats = stats
        self._published_at = time.monotonic()

    def step(self, duration_s: float, size: tuple[int, int]) -> None:
        """Count a call of the engine's `step` that began a step of `size`: sequences and tokens."""
        self.step_seconds.add(duration_s)
        num_sequences, num_tokens = size
        if num_sequences:  # else it only collected the step before
            self.step_sequences.add(num_sequences)
            self.step_tokens.add(num_tokens)


class QueueReader:
    """Reads the queue's figures every `interval_s` on its own thread, so that a scrape never waits for Redis."""

    def __init__(self, figures: QueueFigures, *, interval_s: float) -> None:
        self._figures = figures
        self._interval_s = interval_s
        # Of the last look; None if it failed, since old figures would look like a queue that stands still.
        self.latest: QueueReading | None = None
        self.has_answered = True  # whether Redis answered the last look, if only to refuse it; a start needs Redis

    def run(self, stopping: threading.Event) -> None:
        """Look again and again, until told to stop."""
        while not stopping.is_set():
            self._look()
            stopping.wait(self._interval_s)

    def _look(self) -> None:
        try:
            self.latest = self._figures.read()
            self.has_answered = True
        except redis.RedisError as error:
            logger.warning("the queue's figures could not be read: %s", error)
            self.latest = None
            # A refusal, such as NOPERM with an older ACL file, does not stop the work.
            self.has_answered = isinstance(error, redis.ResponseError)
        except Exception:  # a seam: unreadable keys are no reason to end every worker of the queue
            logger.exception("the queue's figures make no sense")
            self.latest = None
            self.has_answered = True
