"""The engine for encoders (BERT): texts in, vectors or scores of classes out.

An encoder has no KV cache, so there is no scheduler: a queue says which whole inputs run next.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from engine.checkpoint.classifier_config import ClassifierConfig
from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.embedding import EmbeddingRequests, EmbeddingState, pool
from engine.engine import StepLoop
from engine.errors import InvalidRequest
from engine.execution.forward import EncoderExecutor
from engine.kv_cache.block_manager import BlockHashChain
from engine.out_of_memory import step_failure
from engine.request import AnyRequest, ClassificationRequest, PooledRequest, ResumeState
from engine.scheduling.waiting_queue import SchedulerLimits, WaitingQueue
from engine.stats import EngineStats
from engine.text.tokenizer import Tokenizer
from engine.validation import UNSUPPORTED, check_pooled_request
from settings import EffectiveSettings


@dataclass(frozen=True, eq=False)
class EncoderParts:
    """What the engine of an encoder is built from: loaded, warmed up."""

    effective: EffectiveSettings  # fully derived
    executor: EncoderExecutor
    tokenizer: Tokenizer
    embedding: EmbeddingConfig
    max_model_len: int  # tokens of one input


class EncoderEngine(StepLoop):
    """Serves requests for embeddings or scores of classes, whole inputs together. Single-threaded: its owner calls it.

    Every added request ends in exactly one RequestOutput, handed out by `step`.
    """

    generates = False
    makes_comparable_embeddings = True  # there is nothing else to make of what an encoder without a head gives

    def __init__(self, parts: EncoderParts) -> None:
        super().__init__(parts.effective, parts.tokenizer)
        settings = self.settings.engine
        self.max_model_len: int = parts.max_model_len  # tokens one input may have
        self.classifier: ClassifierConfig | None = parts.executor.model.config.classifier
        self._executor = parts.executor
        limits = SchedulerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.unified_prefill)
        self._queue = EncoderQueue(limits)
        self._embeddings = EmbeddingRequests(
            self._queue,
            self._finished,
            lambda _, salt: BlockHashChain(1, salt),  # no KV, so no blocks to hash
            config=parts.embedding,
            arrivals=count(1),
            deduplicate=settings.deduplicate,
        )

    def add_request(self, request: AnyRequest) -> None:
        """Queue a request. Raises InvalidRequest (PromptTooLong, ...) for one that can never be served,
        EngineFatal once a step has failed.
        """
        self._check()
        if not isinstance(request, PooledRequest):
            raise InvalidRequest("this model is an encoder: it generates nothing", code=UNSUPPORTED)
        check_pooled_request(
            request,
            vocab_size=self._executor.model.config.vocab_size,
            capacity=self.max_model_len,
            is_taken=request.request_id in self._embeddings,
            config=self._embeddings.config,
            has_head=self.classifier is not None,
        )
        self._embeddings.add(request)

    def due_resume_states(self) -> Mapping[str, ResumeState]:
        """Always empty: an input is done in one step."""
        return {}

    def resume_state(self, request_id: str) -> ResumeState | None:
        """None: half a vector is no use."""
        return None

    def abort(self, request_id: str) -> bool:
        """End a request now; False, and no change, for one that is not unfinished."""
        return self._embeddings.abort(request_id)

    def stats(self) -> EngineStats:
        """Figures at this moment. No sequence runs: between steps none is half done."""
        return replace(super().stats(), num_waiting=self._queue.num_waiting)

    def close(self) -> None:
        """End every unfinished request as cancelled; `step` hands their outputs out."""
        self._embeddings.close()

    @property
    def _has_work(self) -> bool:
        return self._queue.has_work

    def _advance(self) -> None:
        if not self._queue.has_work:
            return
        states = self._queue.schedule()
        self._num_steps += 1
        self._step_size = (len(states), sum(len(state.token_ids) for state in states))
        try:
            hidden = self._executor.execute([state.token_ids for state in states], _second_starts(states))
            chunks = [(state, 0, rows) for state, rows in zip(states, hidden, strict=True)]
            vectors = pool(chunks, self._executor.model.classifier).now()
        except Exception as error:  # a seam: after any error in a pass the engine cannot be trusted
            raise step_failure(error, self._executor.model.device) from error
        for state, vector in zip(states, vectors, strict=True):
            self._embeddings.take(state, vector)


def _second_starts(states: Sequence[EmbeddingState]) -> list[int]:
    """For each sequence where the second text of a pair begins: at its end where it is one text."""
    starts: list[int] = []
    for state in states:
        request = state.request
        pairs = request.second_starts if isinstance(request, ClassificationRequest) else ()
        starts.append(pairs[state.index] if pairs else len(state.token_ids))
    return starts


class EncoderQueue:
    """Takes whole sequences up to the token budget of a step, in the order of the WaitingQueue.

    An encoder keeps nothing between steps, so there are no blocks, no prefixes and no preemption.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._waiting: WaitingQueue[EmbeddingState] = WaitingQueue(limits)
        self._scheduled: list[EmbeddingState] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits."""
        return self.num_waiting > 0

    def add(self, state: EmbeddingState) -> None:
        """Queue a new sequence."""
        self._waiting.add(state)

    def promote(self, state: EmbeddingState, priority: int) -> None:
        """Make an unfinished sequence more urgent."""
        self._waiting.remove(state)
        state.priority = priority
        self._waiting.add(state)

    def finish(self, state: EmbeddingState, *, kv_is_good: bool = True) -> None:
        """Take out an unfinished sequence. There is no KV to free."""
        if state not in self._scheduled:
            self._waiting.remove(state)

    def schedule(self) -> list[EmbeddingState]:
        """Take out the sequences of the next step. One that is longer than the budget gets a step of its own."""
        self._scheduled = []
        now_s = time.monotonic()
        budget = self._limits.max_num_batched_tokens
        for state in self._waiting.candidates(_blocked_at):
            if self._scheduled and len(state.token_ids) > budget:
                break
            self._waiting.admit(state)
            state.scheduled_s = now_s
            self._waiting.charge(state, len(state.token_ids))
            self._scheduled.append(state)
            budget -= len(state.token_ids)
            if budget <= 0 or len(self._scheduled) == self._limits.max_num_seqs:
                break
        return self._scheduled


def _blocked_at(_: EmbeddingState) -> None:
    """No sequence waits for a block that another one computes: there are none."""
