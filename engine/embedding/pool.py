"""From the hidden states of a step to vectors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from engine.embedding.embedding_state import EmbeddingState
from engine.errors import NonFiniteLogits
from engine.execution.pending_result import PendingResult

Vector: TypeAlias = "array[float] | NonFiniteLogits | None"


@torch.inference_mode()
def pool(chunks: Sequence[tuple[EmbeddingState, int, torch.Tensor]]) -> PendingResult[list[Vector]]:
    """Pool what a step computed: (state, start, hidden), hidden [n, H] from `start` on, to be read as one tensor.

    For each the vector it completes, float32, cut to what its request asks for and of length 1; None where more chunks
    are to come. NonFiniteLogits for a vector that is not finite, or a chunk whose last row is not: that token saw all
    others, so it tells whether their KV is good.
    """
    if not chunks:
        return PendingResult((), lambda _: [])
    for state, start, hidden in chunks:
        state.pooler.add(start, hidden)
    # Known now: when this is read, the chunk behind it may have been pooled, too.
    ends = [(state, start + hidden.shape[0], state.pooler.is_complete) for state, start, hidden in chunks]
    rows = [state.pooler.vector if state.pooler.is_complete else hidden[-1].float() for state, _, hidden in chunks]
    return PendingResult((torch.stack(rows),), lambda on_host: _vectors(ends, on_host[0].numpy()))


def _vectors(ends: Sequence[tuple[EmbeddingState, int, bool]], rows: NDArray[np.float32]) -> list[Vector]:
    """ends: states, the position behind each chunk, and whether that is the last. rows [chunks, H]."""
    answers: list[Vector] = []
    for (state, end, is_complete), row in zip(ends, rows, strict=True):
        if not np.isfinite(row).all():
            answers.append(NonFiniteLogits(f"the model's hidden states are not finite before position {end}"))
        else:
            answers.append(_unit_vector(row[: state.request.dimensions]) if is_complete else None)
    return answers


def _unit_vector(values: NDArray[np.float32]) -> array[float]:
    """`values` [n] scaled to length 1; zeros stay what they are. In float64, where no square overflows."""
    exact = values.astype(np.float64)
    scaled = exact / (np.linalg.norm(exact) or 1.0)
    return array("f", scaled.astype(np.float32).tobytes())
