"""How much work a case has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Counts shared by all cases; the defaults are those of the goals."""

    few_tokens: int = 64  # a decode step
    many_tokens: int = 8192  # a prefill step
    context_tokens: int = 4096
    chunk_tokens: int = 512  # queries of a prefill over a cached prefix
    penalised_tokens: int = 1024  # of one row
