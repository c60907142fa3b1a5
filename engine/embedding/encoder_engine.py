"""Texts in, vectors out: the engine of an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from engine.admission import check_embedding_request
from engine.any_request import AnyRequest
from engine.embedding.embedding_requests import EmbeddingRequests
from engine.embedding.embedding_state import EmbeddingState
from engine.embedding.encoder_queue import EncoderQueue
from engine.embedding.pool import pool
from engine.embedding_request import EmbeddingRequest
from engine.errors import InvalidRequest
from engine.finished_requests import FinishedRequests
from engine.kv_cache.block_hash_chain import BlockHashChain
from engine.loading.encoder_parts import EncoderParts
from engine.out_of_memory import step_failure
from engine.request_output import RequestOutput
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.text.tokenizer import Tokenizer
from engine.token_checkpoint import TokenCheckpoint
from settings import EffectiveSettings, Settings


class EncoderEngine:
    """Runs whole inputs together, step by step; has no KV cache. Single-threaded: whoever made it calls it.

    Serves embedding requests only. Every added request ends in exactly one RequestOutput, handed out by `step`.
    """

    generates = False  # it makes embeddings only

    def __init__(self, parts: EncoderParts) -> None:
        settings = parts.effective.settings.engine
        self.effective: EffectiveSettings = parts.effective
        self.tokenizer: Tokenizer = parts.tokenizer
        self.max_model_len: int = parts.max_model_len  # tokens one input may have
        self._executor = parts.executor
        limits = SchedulerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.unified_prefill)
        self._queue = EncoderQueue(limits)
        self._finished = FinishedRequests()
        self._embeddings = EmbeddingRequests(
            self._queue,
            self._finished,
            lambda _, salt: BlockHashChain(1, salt),  # nothing is shared, so nothing is hashed
            config=parts.embedding,
            arrivals=count(1),
            deduplicate=settings.deduplicate,
        )

    @property
    def settings(self) -> Settings:
        """What the engine holds, derived values included."""
        return self.effective.settings

    def add_request(self, request: AnyRequest) -> None:
        """Queue a request. Raises InvalidRequest (PromptTooLong, ...) for one that can never be served."""
        if not isinstance(request, EmbeddingRequest):
            raise InvalidRequest("this model is an encoder: it makes embeddings only", code="unsupported_endpoint")
        check_embedding_request(
            request,
            vocab_size=self._executor.model.config.vocab_size,
            capacity=self.max_model_len,
            is_taken=request.request_id in self._embeddings,
            config=self._embeddings.config,
        )
        self._embeddings.add(request)

    def due_checkpoints(self) -> Mapping[str, TokenCheckpoint]:
        """None, ever: an input is one step."""
        return {}

    def checkpoint(self, request_id: str) -> TokenCheckpoint | None:
        """None: there is no half of a vector that could be kept."""
        return None

    def abort(self, request_id: str) -> bool:
        """End a request now; False, and no change, for one that is not unfinished."""
        return self._embeddings.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of the requests that ended since the last call, aborted ones included.

        Raises EngineFatal when the step itself failed (out of memory, a fault of the device): stop the engine then.
        """
        if self._queue.has_work:
            self._run(self._queue.schedule())
        return self._finished.take()

    def has_unfinished(self) -> bool:
        """Whether `step` has something to run or to hand out."""
        return self._queue.has_work or not self._finished.is_empty

    def close(self) -> None:
        """End every unfinished request as cancelled; `step` hands their outputs out."""
        self._embeddings.close()

    def _run(self, states: Sequence[EmbeddingState]) -> None:
        try:
            hidden = self._executor.execute([state.token_ids for state in states])
            vectors = pool([(state, 0, rows) for state, rows in zip(states, hidden, strict=True)]).now()
        except Exception as error:
            raise step_failure(error, self._executor.model.device) from error
        for state, vector in zip(states, vectors, strict=True):
            self._embeddings.take(state, vector)
