"""When a request got how far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """When a request got how far, in seconds of this process's time.monotonic(). Of several sequences, the first."""

    arrived_s: float  # at the engine
    scheduled_s: float | None  # for the first time; None: never
    first_token_s: float | None  # None: none was generated here, as for an embedding
    finished_s: float
