"""How many requests are given to the engine ahead."""

from __future__ import annotations

# Requests in the engine at once, as a multiple of those that run at once: the rest wait, sorted by prefix.
WINDOW_FACTOR = 8


def request_window(max_num_seqs: int) -> int:
    """Requests to keep in an engine that runs up to `max_num_seqs` at once."""
    return WINDOW_FACTOR * max_num_seqs
