"""When attention over a shared prefix is computed once for all rows that share it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedPrefixGate:
    """Bounds below which each row is faster by itself: a group costs launches, copies and a merge."""

    min_rows: int
    min_tokens: int  # shared ones
    min_saved_tokens: int  # tokens that need not be read again: (rows - 1) * shared tokens

    def __call__(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a group of num_rows rows (2 or more) that share num_tokens tokens is worth it."""
        is_large = num_rows >= self.min_rows and num_tokens >= self.min_tokens
        return is_large and (num_rows - 1) * num_tokens >= self.min_saved_tokens


# From `python -m tests.benchmarks.shared_prefix` on a CPU (tables in engine/DESIGN.md); not measured on a GPU.
# Rows with one query: a product with few queries is slow, and reading shared keys again finds them in the cache.
DECODE_GATE = SharedPrefixGate(min_rows=8, min_tokens=64, min_saved_tokens=2048)
# Chunks bring enough queries by themselves: any group pays.
PREFILL_GATE = SharedPrefixGate(min_rows=2, min_tokens=16, min_saved_tokens=16)
