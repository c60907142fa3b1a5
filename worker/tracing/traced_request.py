"""What a span says of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that ended: when it got how far, in seconds of time.monotonic(), and in numbers. None of its words."""

    index: int  # 0-based line of the job
    operation: str  # as OpenTelemetry's conventions for generative AI have it: chat, text_completion, embeddings
    arrived_s: float  # at the engine
    scheduled_s: float
    first_token_s: float | None  # None: nothing was generated
    finished_s: float
    input_tokens: int
    cached_tokens: int  # of these
    output_tokens: int
    finish_reasons: tuple[str, ...]
    error_type: str | None  # the name of its error's class
