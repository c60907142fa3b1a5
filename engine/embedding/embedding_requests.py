"""The embedding requests of an engine."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence

from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.embedding.embedding_state import EmbeddingState
from engine.embedding.pooler import Pooler
from engine.embedding.sequence_queue import SequenceQueue
from engine.embedding_request import EmbeddingRequest
from engine.errors import EngineError
from engine.finished_requests import FinishedRequests
from engine.kv_cache.block_hash_chain import BlockHashChain
from engine.request import RESERVED_PREFIX
from engine.scheduling.group_table import GroupTable
from engine.scheduling.sequence_group import SequenceGroup

NewChain = Callable[[Sequence[int], str], BlockHashChain]  # token ids, salt
_Group = SequenceGroup[EmbeddingRequest, EmbeddingState]

KEY_BYTES = 16


class EmbeddingRequests:
    """Makes sequences of embedding requests, takes the vectors of these and hands the requests' outputs out.

    Equal unfinished requests of one tenant are computed once. Where every position counts, nothing may come from the
    prefix cache: such a sequence has digests that no other has, and its blocks are forgotten with it.
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
        self._groups: GroupTable[_Group] = GroupTable()

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this id is unfinished."""
        return request_id in self._groups

    def add(self, request: EmbeddingRequest) -> None:
        """Queue the inputs of a checked request, or wait for those of an equal one."""
        key = _key_of(request) if self._deduplicate else None
        group = self._groups.join(request, key)
        if group is None:
            self._start([request], key, request.priority)
        elif request.priority < group.priority:
            for state in group.unfinished:
                self._queue.promote(state, request.priority)

    def take(self, state: EmbeddingState, answer: array[float] | EngineError | None) -> None:
        """Take a step's answer for a sequence, see `pool`; hand out what its vector completes.

        An error instead of a vector fails the request. Of a sequence that has ended, as when another input of its
        request failed in this very step, nothing is taken.
        """
        if answer is None or state.is_finished:
            return
        if isinstance(answer, EngineError):
            self._fail(state, answer)
            return
        state.embedding = answer
        self._finish(state)
        self._hand_out_if_complete(self._groups.of(state))

    def abort(self, request_id: str) -> bool:
        """End a request without vectors; False for one that is not unfinished. Equal requests keep the work."""
        group = self._groups.find(request_id)
        if group is None:
            return False
        request = group.request_named(request_id)
        if len(group.requests) > 1:
            self._groups.withdraw(request)
        else:
            self._drop(group)
        self._finished.add_embeddings(request_id, request.num_prompt_tokens, 0, ())
        return True

    def close(self) -> None:
        """Abort all of them."""
        for group in self._groups:
            for request in group.requests:
                self.abort(request.request_id)

    def _start(self, requests: list[EmbeddingRequest], key: bytes | None, priority: int) -> None:
        first, arrival = requests[0], next(self._arrivals)
        group = _Group(
            requests, tuple(self._new_state(first, arrival, index) for index in range(len(first.inputs))), key
        )
        self._groups.add(group)
        for state in group.states:
            state.priority = priority
            self._queue.add(state)

    def _new_state(self, request: EmbeddingRequest, arrival: int, index: int) -> EmbeddingState:
        token_ids = list(request.inputs[index])
        is_private = self.config.needs_every_position
        salt = f"{RESERVED_PREFIX}/{arrival}/{index}" if is_private else request.tenant
        return EmbeddingState(
            request=request,
            index=index,
            arrival=arrival,
            chain=self._new_chain(token_ids, salt),
            token_ids=token_ids,
            pooler=Pooler(self.config.pooling, len(token_ids)),
        )

    def _fail(self, state: EmbeddingState, error: EngineError) -> None:
        """One input failed, so its request did."""
        group = self._groups.of(state)
        state.has_ended = True
        self._queue.finish(state, kv_is_good=False)
        self._drop(group)
        ended, others = group.parted(error)
        for position, request in enumerate(ended):
            timings = None if position else group.timings_now()
            self._finished.add_failed_embeddings(request.request_id, request.num_prompt_tokens, error, timings)
        if others:
            self._start(others, group.key, group.priority)

    def _finish(self, state: EmbeddingState) -> None:
        state.has_ended = True
        # Private blocks can serve nobody: they must not push out others'.
        self._queue.finish(state, kv_is_good=not self.config.needs_every_position)

    def _hand_out_if_complete(self, group: _Group) -> None:
        if not group.is_complete:
            return
        self._drop(group)
        embeddings = tuple(state.embedding or array("f") for state in group.states)
        num_cached_tokens = sum(state.num_cached_tokens for state in group.states)
        for position, request in enumerate(group.requests):
            num_tokens = request.num_prompt_tokens
            self._finished.add_embeddings(
                request.request_id,
                num_tokens,
                num_tokens if position else num_cached_tokens,  # nothing was computed for the others
                embeddings,
                timings=None if position else group.timings_now(),
                is_duplicate=position > 0,
            )

    def _drop(self, group: _Group) -> None:
        """Forget a group, and take out of the queue what it still has there."""
        for state in group.unfinished:
            self._finish(state)
        self._groups.drop(group)


def _key_of(request: EmbeddingRequest) -> bytes:
    """Names a request's vectors."""
    digest = hashlib.blake2b(repr((request.tenant, request.dimensions)).encode(), digest_size=KEY_BYTES)
    for token_ids in request.inputs:
        digest.update(len(token_ids).to_bytes(8, "little"))
        digest.update(array("q", token_ids).tobytes())
    return digest.digest()
