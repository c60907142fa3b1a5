"""Keeps the unfinished requests for embeddings and for scores of classes, and pools hidden states into their vectors.

Each input is run as a prefill of its own and pooled chunk by chunk. An embedding is float32 and of length 1; of a model
with a classification head the pooled state becomes one score a class instead.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoint.embedding_config import EmbeddingConfig, Pooling
from engine.errors import NonFiniteLogits
from engine.kv_cache.block_manager import BlockHashChain
from engine.models.classifier import ClassificationHead, activated
from engine.outputs import FinishedRequests
from engine.request import RESERVED_PREFIX, ClassificationRequest, EmbeddingRequest, PooledRequest, RequestOutput
from engine.scheduling.sequence import SequenceState
from engine.staging import PendingResult
from engine.unfinished import KEY_BYTES, SequenceGroup, SequenceQueue, UnfinishedRequests

NewChain = Callable[[Sequence[int], str], BlockHashChain]  # token ids, salt

Vector: TypeAlias = "array[float] | NonFiniteLogits | None"


class Pooler:
    """Takes a sequence's hidden states chunk by chunk and keeps one vector of them.

    mean: of all tokens; cls: the first token's; last_token: the last one's (as sentence-transformers defines them,
    special tokens included). Positions that come twice, as after a preemption, count once.
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


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddingState(SequenceState):
    """One of a request's inputs: run as a prefill, whose hidden states are pooled."""

    request: PooledRequest
    pooler: Pooler
    has_ended: bool = False  # with its vector or without
    vector: array[float] | None = None  # float32: an embedding, of length 1, or one score a class

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the input."""
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it has its vector, or is not to get one."""
        return self.has_ended

    @property
    def wants_logits(self) -> bool:
        """Never: no token is generated."""
        return False

    @property
    def wants_hidden(self) -> bool:
        """Always: they are pooled."""
        return True


_Group = SequenceGroup[PooledRequest, EmbeddingState]


class EmbeddingRequests(UnfinishedRequests[PooledRequest, EmbeddingState, _Group, "array[float]"]):
    """Makes sequences of requests for embeddings or classes, takes their vectors and hands the requests' outputs out.

    Where the vector needs the hidden states of every position, no KV may come from the prefix cache: the blocks of such
    a sequence have digests of their own. They are no use to others, so they are forgotten when it ends.
    """

    def __init__(
        self,
        queue: SequenceQueue[EmbeddingState],
        finished: FinishedRequests,
        new_chain: NewChain,
        *,
        config: EmbeddingConfig,
        arrivals: Iterator[int],
        deduplicate: bool,
    ) -> None:
        super().__init__(queue, finished, shares_kv=not config.needs_every_position)
        self._new_chain = new_chain
        self.config = config  # what is pooled, and how far vectors may be cut
        self._arrivals = arrivals  # numbers the groups; shared with the engine's other requests
        self._deduplicate = deduplicate

    def add(self, request: PooledRequest) -> None:
        """Queue the inputs of a checked request, or wait for the vectors of an equal one."""
        key = _key_of(request) if self._deduplicate else None
        if not self._join(request, key):
            self._start(self._new_group([request], key))

    def _apply(self, state: EmbeddingState, answer: array[float]) -> bool:
        state.vector, state.has_ended = answer, True
        return True

    def _end(self, state: EmbeddingState) -> None:
        state.has_ended = True

    def _output(self, group: _Group) -> RequestOutput:
        """An aborted request has no vectors: none is handed out without the others."""
        vectors = tuple(state.vector for state in group.states if state.vector is not None)
        is_whole, request = len(vectors) == len(group.states), group.request
        is_embedding = isinstance(request, EmbeddingRequest)
        return RequestOutput(
            request.request_id,
            request.num_prompt_tokens,
            num_cached_tokens=sum(state.num_cached_tokens for state in group.states) if is_whole else 0,
            completions=(),
            error=group.error,
            embeddings=vectors if is_whole and is_embedding else (),
            class_scores=vectors if is_whole and not is_embedding else (),
            timings=group.timings_now() if is_whole or group.error is not None else None,
        )

    def _ended_copy(self, request: PooledRequest, group: _Group) -> _Group:
        return _Group([request], group.states, None)

    def _begin_again(self, group: _Group, requests: list[PooledRequest]) -> _Group:
        return self._new_group(requests, group.key)

    def _new_group(self, requests: list[PooledRequest], key: bytes | None) -> _Group:
        first, arrival = requests[0], next(self._arrivals)
        states = (self._new_state(first, arrival, index) for index in range(len(first.inputs)))
        return _Group(requests, tuple(states), key)

    def _new_state(self, request: PooledRequest, arrival: int, index: int) -> EmbeddingState:
        token_ids = list(request.inputs[index])
        # What a decoder has seen by the last token that is no padding does not depend on what follows.
        while len(token_ids) > 1 and token_ids[-1] == self.config.padding_id:
            token_ids.pop()
        salt = request.tenant if self._shares_kv else f"{RESERVED_PREFIX}/{arrival}/{index}"
        return EmbeddingState(
            request=request,
            index=index,
            arrival=arrival,
            chain=self._new_chain(token_ids, salt),
            token_ids=token_ids,
            pooler=Pooler(self.config.pooling, len(token_ids)),
        )


def _key_of(request: PooledRequest) -> bytes:
    """The same for requests that get the same vectors."""
    if isinstance(request, EmbeddingRequest):
        asked: tuple[object, ...] = (request.dimensions,)
    else:
        asked = (request.activation, tuple(request.second_starts))
    digest = hashlib.blake2b(repr((request.tenant, *asked)).encode(), digest_size=KEY_BYTES)
    for token_ids in request.inputs:
        digest.update(len(token_ids).to_bytes(8, "little"))
        digest.update(array("q", token_ids).tobytes())
    return digest.digest()


@torch.inference_mode()
def pool(
    chunks: Sequence[tuple[EmbeddingState, int, torch.Tensor]], head: ClassificationHead | None = None
) -> PendingResult[list[Vector]]:
    """Pool what a step computed: (state, start, hidden), hidden [n, H] from position `start` on.

    The answer to each chunk is None where more chunks are to come, else the vector: float32, cut to the dimensions that
    its request asks for, and of length 1; where the model has a head, the scores of its classes. It is NonFiniteLogits
    if the vector is not finite, or the chunk's last row: that token saw all the others, so it tells whether their KV is
    good.
    """
    if not chunks:
        return PendingResult((), lambda _: [])
    for state, start, hidden in chunks:
        state.pooler.add(start, hidden)
    # Noted now: by the time this is read, the next chunk may have been pooled too.
    ends = [(state, start + hidden.shape[0], state.pooler.is_complete) for state, start, hidden in chunks]
    rows = [state.pooler.vector if state.pooler.is_complete else hidden[-1].float() for state, _, hidden in chunks]
    pooled = torch.stack(rows)
    answers = pooled if head is None else head.logits(pooled)
    return PendingResult((answers,), lambda on_host: _vectors(ends, on_host[0].numpy()))


def _vectors(ends: Sequence[tuple[EmbeddingState, int, bool]], rows: NDArray[np.float32]) -> list[Vector]:
    """ends: states, the position after each chunk, and whether that is the last. rows: what is pooled, [chunks, H], or
    logits of classes.
    """
    answers: list[Vector] = []
    for (state, end, is_complete), row in zip(ends, rows, strict=True):
        if not np.isfinite(row).all():
            answers.append(NonFiniteLogits(f"the model's hidden states are not finite before position {end}"))
        else:
            answers.append(_vector(state.request, row) if is_complete else None)
    return answers


def _vector(request: PooledRequest, row: NDArray[np.float32]) -> array[float]:
    if isinstance(request, ClassificationRequest):
        return array("f", activated(row, request.activation).tobytes())
    return _unit_vector(row[: request.dimensions])


def _unit_vector(values: NDArray[np.float32]) -> array[float]:
    """`values` [n] scaled to length 1; all zeros stay zeros. In float64, where no square overflows."""
    exact = values.astype(np.float64)
    scaled = exact / (np.linalg.norm(exact) or 1.0)
    return array("f", scaled.astype(np.float32).tobytes())
