"""The embedding requests of an engine."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence

import torch

from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.embedding.embedding_group import EmbeddingGroup
from engine.embedding.embedding_state import EmbeddingState
from engine.embedding.pooler import Pooler, finished_vector
from engine.embedding.sequence_queue import SequenceQueue
from engine.embedding_request import EmbeddingRequest
from engine.errors import EngineError, NonFiniteLogits
from engine.finished_requests import FinishedRequests
from engine.kv_cache.block_hash_chain import BlockHashChain
from engine.request import RESERVED_PREFIX

NewChain = Callable[[Sequence[int], str], BlockHashChain]  # token ids, salt

KEY_BYTES = 16


class EmbeddingRequests:
    """Makes sequences of embedding requests, pools what is computed for them and hands their outputs out.

    Equal unfinished requests of one tenant are computed once, as in Duplicates. Where every position counts, nothing
    may come from the prefix cache: such a sequence has digests that no other has, and its blocks are forgotten with it.
    """

    def __init__(
        self,
        queue: SequenceQueue,
        finished: FinishedRequests,
        new_chain: NewChain,
        *,
        config: EmbeddingConfig,
        arrivals: Iterator[int],
        deduplicate: bool,
    ) -> None:
        self._queue = queue
        self._finished = finished
        self._new_chain = new_chain
        self.config = config  # what is pooled, and how far vectors may be cut
        self._arrivals = arrivals  # shared with whatever else queues sequences: they are told apart by these numbers
        self._deduplicate = deduplicate
        self._groups: dict[str, EmbeddingGroup] = {}  # by the ids of their requests
        self._groups_by_arrival: dict[int, EmbeddingGroup] = {}
        self._groups_by_key: dict[bytes, EmbeddingGroup] = {}

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this id is unfinished."""
        return request_id in self._groups

    def add(self, request: EmbeddingRequest) -> None:
        """Queue the inputs of a checked request, or wait for those of an equal one."""
        key = _key_of(request) if self._deduplicate else None
        group = None if key is None else self._groups_by_key.get(key)
        if group is None:
            self._start([request], key, request.priority)
            return
        group.requests.append(request)
        self._groups[request.request_id] = group
        if request.priority < group.priority:
            for state in group.unfinished:
                self._queue.promote(state, request.priority)

    def take(self, state: EmbeddingState, start: int, answer: torch.Tensor | EngineError) -> None:
        """Pool what was computed for a sequence from position `start` on, [n, H]; hand out what that completes.

        An error instead of hidden states fails the request. Of a sequence that has ended, as when another input of
        its request failed in this very step, nothing is taken.
        """
        if state.is_finished:
            return
        if isinstance(answer, EngineError):
            self._fail(state, answer)
            return
        state.pooler.add(start, answer)
        if not state.pooler.is_complete:
            return
        state.embedding = finished_vector(state.pooler.vector, state.request.dimensions)
        if state.embedding is None:
            self._fail(state, NonFiniteLogits("the model's hidden states are not finite"))
            return
        self._finish(state)
        self._hand_out_if_complete(self._groups_by_arrival[state.arrival])

    def abort(self, request_id: str) -> bool:
        """End a request without vectors; False for one that is not unfinished. Equal requests keep the work."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        (request,) = (request for request in group.requests if request.request_id == request_id)
        if len(group.requests) == 1:
            self._drop(group)
        else:
            group.requests.remove(request)
            del self._groups[request_id]
        self._finished.add_embeddings(request_id, request.num_prompt_tokens, 0, ())
        return True

    def close(self) -> None:
        """Abort all of them."""
        for request_id in list(self._groups):
            self.abort(request_id)

    def _start(self, requests: list[EmbeddingRequest], key: bytes | None, priority: int) -> None:
        first, arrival = requests[0], next(self._arrivals)
        states = tuple(self._new_state(first, arrival, index) for index in range(len(first.inputs)))
        group = EmbeddingGroup(requests, states, key)
        self._groups.update(dict.fromkeys((request.request_id for request in requests), group))
        self._groups_by_arrival[arrival] = group
        if key is not None:
            self._groups_by_key[key] = group
        for state in states:
            state.priority = priority
            self._queue.add(state)

    def _new_state(self, request: EmbeddingRequest, arrival: int, index: int) -> EmbeddingState:
        token_ids = list(request.inputs[index])
        is_private = self.config.needs_every_position
        salt = f"{RESERVED_PREFIX}/{arrival}/{index}" if is_private else request.tenant
        chain, pooler = self._new_chain(token_ids, salt), Pooler(self.config.pooling, len(token_ids))
        return EmbeddingState(request, index, arrival, chain, token_ids, pooler)

    def _fail(self, state: EmbeddingState, error: EngineError) -> None:
        """One input failed, so its request did; equal requests are tried again without it."""
        group = self._groups_by_arrival[state.arrival]
        state.has_ended = True
        self._queue.finish(state, kv_is_good=False)
        self._drop(group)
        failed, *others = group.requests
        self._finished.add_failed_embeddings(failed.request_id, failed.num_prompt_tokens, error)
        if others:
            self._start(others, group.key, group.priority)

    def _finish(self, state: EmbeddingState) -> None:
        state.has_ended = True
        # Private blocks can serve nobody: they must not push out others'.
        self._queue.finish(state, kv_is_good=not self.config.needs_every_position)

    def _hand_out_if_complete(self, group: EmbeddingGroup) -> None:
        if group.unfinished:
            return
        self._drop(group)
        embeddings = tuple(state.embedding or array("f") for state in group.states)
        num_cached_tokens = sum(state.num_cached_tokens for state in group.states)
        for position, request in enumerate(group.requests):
            num_tokens = request.num_prompt_tokens
            cached = num_tokens if position else num_cached_tokens  # nothing was computed for the others
            self._finished.add_embeddings(request.request_id, num_tokens, cached, embeddings, is_duplicate=position > 0)

    def _drop(self, group: EmbeddingGroup) -> None:
        """Forget a group, and take out of the queue what it still has there."""
        for state in group.unfinished:
            self._finish(state)
        del self._groups_by_arrival[group.arrival]
        for request in group.requests:
            del self._groups[request.request_id]
        if group.key is not None:
            del self._groups_by_key[group.key]


def _key_of(request: EmbeddingRequest) -> bytes:
    """Names a request's vectors."""
    digest = hashlib.blake2b(repr((request.tenant, request.dimensions)).encode(), digest_size=KEY_BYTES)
    for token_ids in request.inputs:
        digest.update(len(token_ids).to_bytes(8, "little"))
        digest.update(array("q", token_ids).tobytes())
    return digest.digest()
