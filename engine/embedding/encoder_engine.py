"""Texts in, vectors out: the engine of an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from engine.admission import check_embedding_request
from engine.any_request import AnyRequest
from engine.embedding.embedding_requests import EmbeddingRequests
from engine.embedding.encoder_queue import EncoderQueue
from engine.embedding.pool import pool
from engine.embedding_request import EmbeddingRequest
from engine.engine_stats import EngineStats
from engine.errors import InvalidRequest
from engine.finished_requests import FinishedRequests
from engine.kv_cache.block_hash_chain import BlockHashChain
from engine.loading.encoder_parts import EncoderParts
from engine.out_of_memory import step_failure
from engine.request_output import RequestOutput
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.steps import Steps
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
        self._steps = Steps(self._finished)
        self._num_steps = 0
        self._step_size = (0, 0)
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
        """Queue a request. Raises InvalidRequest (PromptTooLong, ...) for one that can never be served,
        EngineFatal once a step has failed.
        """
        self._steps.check()
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

        Raises EngineFatal when the step itself failed (out of memory, a fault of the device), and from then on: stop
        the engine. What had ended by then is handed out first; the next call raises.
        """
        return self._steps.run(self._advance)

    def has_unfinished(self) -> bool:
        """Whether `step` has something to run, to hand out or to raise."""
        return self._queue.has_work or self._steps.have_failed or not self._finished.is_empty

    @property
    def step_size(self) -> tuple[int, int]:
        """Sequences and tokens of the last call of `step`; (0, 0) where there was nothing to run."""
        return self._step_size

    def stats(self) -> EngineStats:
        """Figures at this moment."""
        settings, finished = self.settings.engine, self._finished
        return EngineStats(
            device=settings.device,
            dtype=settings.dtype,
            num_steps=self._num_steps,
            num_running=0,  # between steps none is half done
            num_waiting=self._queue.num_waiting,
            num_finished_requests=finished.num_requests,
            num_duplicates=finished.num_duplicates,
            prompt_tokens=finished.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            output_tokens=finished.output_tokens,
            generated_tokens=0,
            num_preemptions=0,
            num_blocks=0,
            num_free_blocks=0,
            prefix_cache=None,
            decode_graphs=None,
        )

    def close(self) -> None:
        """End every unfinished request as cancelled; `step` hands their outputs out."""
        self._embeddings.close()

    def _advance(self) -> None:
        self._step_size = (0, 0)
        if not self._queue.has_work:
            return
        states = self._queue.schedule()
        self._num_steps += 1
        self._step_size = (len(states), sum(len(state.token_ids) for state in states))
        try:
            hidden = self._executor.execute([state.token_ids for state in states])
            vectors = pool([(state, 0, rows) for state, rows in zip(states, hidden, strict=True)]).now()
        except Exception as error:  # a seam: whatever a pass raised, nobody can vouch for the engine after it
            raise step_failure(error, self._executor.model.device) from error
        for state, vector in zip(states, vectors, strict=True):
            self._embeddings.take(state, vector)
