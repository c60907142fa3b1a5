"""How much is given to the engine ahead."""

from __future__ import annotations

from engine.request import AnyRequest, EmbeddingRequest

# Sequences in the engine at once, as a multiple of those that run at once: the rest wait, sorted by prefix.
WINDOW_FACTOR = 8


def request_window(max_num_seqs: int) -> int:
    """Sequences to keep in an engine that runs up to `max_num_seqs` at once."""
    return WINDOW_FACTOR * max_num_seqs


def request_room(request: AnyRequest) -> int:
    """How many of a window's sequences a request is: one for each of its inputs (up to 2,048), or of its choices."""
    return len(request.inputs) if isinstance(request, EmbeddingRequest) else request.params.n
