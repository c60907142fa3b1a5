"""From the hidden states of a sequence to one vector."""

from __future__ import annotations

import torch

from engine.checkpoint.embedding_config import Pooling


class Pooler:
    """Takes a sequence's hidden states chunk by chunk and keeps one vector of them.

    mean: of all tokens; cls: the first token's; last_token: the last one's (sentence-transformers'
    definitions, special tokens included). Of a chunk that repeats positions, as after a preemption, only what is new
    counts.
    """

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        self._pooling = pooling
        self._num_tokens = num_tokens
        self._num_seen = 0  # positions before this have been taken or, for last_token, do not matter
        self._sum: torch.Tensor | None = None  # [1, H], float64
        self._vector: torch.Tensor | None = None  # [H], float32

    @property
    def is_complete(self) -> bool:
        """Whether every position has been taken."""
        return self._num_seen == self._num_tokens

    @property
    def vector(self) -> torch.Tensor:
        """[H], float32, not normalised. Raises ValueError before the last position was taken."""
        if not self.is_complete or self._vector is None:
            raise ValueError(f"{self._num_seen} of {self._num_tokens} positions were taken")
        return self._vector

    def add(self, start: int, hidden: torch.Tensor) -> None:
        """Take the tokens from position `start` on. hidden: [n, H], at least one row."""
        rows = hidden[max(self._num_seen - start, 0) :]
        is_first = self._num_seen == 0
        self._num_seen = max(self._num_seen, start + hidden.shape[0])
        if not rows.shape[0]:
            return
        if self._pooling == "mean":
            self._add_to_mean(rows)
        elif self._pooling == "last_token" or is_first:
            # A copy: a view would keep the states of the whole chunk until the request is done.
            self._vector = rows[-1 if self._pooling == "last_token" else 0].clone().float()

    def _add_to_mean(self, rows: torch.Tensor) -> None:
        # cumsum adds row after row (on CPUs), so that chunks do not change the bits; sum adds in pairs.
        terms = rows.double() if self._sum is None else torch.cat([self._sum, rows.double()])
        self._sum = terms.cumsum(dim=0)[-1:].clone()  # a view would keep all of the chunk's sums
        self._vector = (self._sum[0] / self._num_seen).float()
