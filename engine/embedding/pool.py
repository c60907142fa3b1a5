"""From the hidden states of a step to vectors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.embedding.embedding_state import EmbeddingState
from engine.errors import NonFiniteLogits


@torch.inference_mode()
def pool(chunks: Sequence[tuple[EmbeddingState, int, torch.Tensor]]) -> list[array[float] | NonFiniteLogits | None]:
    """Pool what a step computed, copied to the host once: (state, start, hidden), hidden [n, H] from `start` on.

    For each the vector it completes, float32, cut to what its request asks for and of length 1; None where more chunks
    are to come. NonFiniteLogits for a vector that is not finite, or a chunk whose last row is not: that token saw all
    others, so it tells whether their KV is good.
    """
    if not chunks:
        return []
    for state, start, hidden in chunks:
        state.pooler.add(start, hidden)
    rows = [state.pooler.vector if state.pooler.is_complete else hidden[-1].float() for state, _, hidden in chunks]
    on_host = torch.stack(rows).cpu().numpy()
    are_finite = np.isfinite(on_host).all(axis=1).tolist()
    answers: list[array[float] | NonFiniteLogits | None] = []
    for (state, start, hidden), row, is_finite in zip(chunks, on_host, are_finite, strict=True):
        if not is_finite:
            end = start + hidden.shape[0]
            answers.append(NonFiniteLogits(f"the model's hidden states are not finite before position {end}"))
        else:
            answers.append(_unit_vector(row[: state.request.dimensions]) if state.pooler.is_complete else None)
    return answers


def _unit_vector(values: NDArray[np.float32]) -> array[float]:
    """`values` [n] scaled to length 1; zeros stay what they are. In float64, where no square overflows."""
    exact = values.astype(np.float64)
    scaled = exact / (np.linalg.norm(exact) or 1.0)
    return array("f", scaled.astype(np.float32).tobytes())
