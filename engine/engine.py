"""The engine for decoders: takes requests, runs steps, hands out what ended.

`StepLoop` is the part that every engine has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from itertools import count

import torch

from engine.checkpoint.classifier_config import ClassifierConfig
from engine.embedding import EmbeddingRequests
from engine.errors import EngineFatal, InvalidRequest, NonFiniteLogits
from engine.execution.model_runner import ModelRunner, StepInFlight
from engine.generation import EngineParts, GenerationRequests
from engine.model_interface import ModelInterface
from engine.out_of_memory import is_out_of_memory
from engine.outputs import FinishedRequests, OutputProcessor
from engine.request import AnyRequest, PooledRequest, RequestOutput, ResumeState
from engine.sampler import Sampler
from engine.scheduling.scheduler import ScheduledBatch, Scheduler
from engine.scheduling.waiting_queue import SchedulerLimits
from engine.staging import make_device_stream
from engine.stats import EngineStats
from engine.text.tokenizer import Tokenizer
from engine.validation import UNSUPPORTED, check_pooled_request, check_request
from settings import EffectiveSettings, Settings


class StepLoop(ABC):
    """What every engine has: settings, a tokenizer, and a loop of steps with counts of what they did.

    Once a step has failed, the engine takes no more requests and runs no more steps.
    """

    def __init__(self, effective: EffectiveSettings, tokenizer: Tokenizer) -> None:
        self.effective: EffectiveSettings = effective
        self.tokenizer: Tokenizer = tokenizer
        self._finished = FinishedRequests()
        self._failure: EngineFatal | None = None  # of the last step
        self._num_steps = 0
        self._step_size = (0, 0)

    @property
    def settings(self) -> Settings:
        """What the engine runs with, derived values included."""
        return self.effective.settings

    @property
    def step_size(self) -> tuple[int, int]:
        """Sequences and tokens of the step that the last call of `step` began; (0, 0) where it began none."""
        return self._step_size

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of the requests that ended since the last call, aborted ones included.

        Raises EngineFatal when the step itself failed (out of memory, a fault of the device), and from then on: stop
        the engine. What had ended by then, in the step before too, is handed out first; the next call raises.
        """
        if self._failure is None:
            try:
                self._step_size = (0, 0)
                self._advance()
            except EngineFatal as failure:
                self._failure = failure
        if self._finished.is_empty:
            self._check()
        return self._finished.take()

    def has_unfinished(self) -> bool:
        """Whether `step` has something to run, to hand out or to raise."""
        return self._has_work or self._failure is not None or not self._finished.is_empty

    def stats(self) -> EngineStats:
        """Figures at this moment."""
        settings, finished = self.settings.engine, self._finished
        return EngineStats(
            device=settings.device,
            dtype=settings.dtype,
            num_steps=self._num_steps,
            num_finished_requests=finished.num_requests,
            num_duplicates=finished.num_duplicates,
            prompt_tokens=finished.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            output_tokens=finished.output_tokens,
        )

    @property
    @abstractmethod
    def _has_work(self) -> bool:
        """Whether there is something to run."""

    @abstractmethod
    def _advance(self) -> None:
        """Run one step, if there is something to run. Raises EngineFatal."""

    def _check(self) -> None:
        """Raise EngineFatal if a step has failed."""
        if self._failure is not None:
            raise EngineFatal(str(self._failure)) from self._failure


class Engine(StepLoop):
    """Runs requests together, step by step. Single-threaded: its owner calls it.

    Every added request ends in exactly one RequestOutput, handed out by `step`. With engine.async_scheduling `step`
    leaves its step running and takes the answers of the one before: while the device works on a step, the host takes
    the answers of the last one and schedules the next. Where a sequence needs its answer first, that is waited for
    before anything is scheduled.
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts.effective, parts.tokenizer)
        settings = self.settings.engine
        self.model_interface: ModelInterface = parts.model_interface
        self.eos_token_ids: frozenset[int] = parts.eos_token_ids
        self.vocab_size: int = parts.executor.model.config.vocab_size  # token ids are below it
        self._executor = parts.executor
        self._blocks = parts.block_manager
        limits = SchedulerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.unified_prefill)
        self._scheduler = Scheduler(limits, parts.block_manager, settings.speculation)
        device = parts.executor.model.device
        self._is_on_host = device.type == "cpu"
        self._unknown_ids = frozenset(parts.tokenizer.unknown_ids(self.vocab_size))
        unknown_ids = torch.tensor(sorted(self._unknown_ids), dtype=torch.int64).to(device)
        self._sampler = Sampler(parts.executor.model.ops, device, unknown_ids)
        parts.executor.never_choose(unknown_ids)
        outputs = OutputProcessor(parts.tokenizer, parts.eos_token_ids)
        stream, on_failure = make_device_stream(device), self.model_interface.mark_failed
        self._runner = ModelRunner(parts.executor, on_failure, parts.block_manager, outputs, self._sampler, stream)
        self._runs_ahead = settings.async_scheduling
        self._in_flight: StepInFlight | None = None  # launched, not collected
        self.classifier: ClassifierConfig | None = parts.executor.model.config.classifier  # None: it knows no classes
        arrivals = count(1)
        self._generation = GenerationRequests(parts, outputs, self._scheduler, self._finished, arrivals)
        self._embeddings = EmbeddingRequests(
            self._scheduler,
            self._finished,
            parts.block_manager.new_chain,
            config=parts.embedding,
            arrivals=arrivals,
            deduplicate=settings.deduplicate,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens one request may have, prompt and output together."""
        return self.model_interface.kv_capacity()

    @property
    def generates(self) -> bool:
        """Whether it continues prompts. False for a model without a head of tokens."""
        return self._executor.model.lm_head is not None

    @property
    def makes_comparable_embeddings(self) -> bool:
        """Whether embeddings are made to be held against each other: there is no head of tokens, or modules.json."""
        return not self.generates or self._embeddings.config.is_declared

    def add_request(self, request: AnyRequest) -> None:
        """Queue a request, or have it wait for the results of an equal one (see GenerationRequests).

        Raises InvalidRequest (PromptTooLong, ...) for one that can never be served, EngineFatal once a step has failed.
        """
        self._check()
        is_taken = request.request_id in self._generation or request.request_id in self._embeddings
        vocab_size, capacity = self.vocab_size, self.max_model_len
        if isinstance(request, PooledRequest):
            config, has_head = self._embeddings.config, self.classifier is not None
            check_pooled_request(
                request,
                vocab_size=vocab_size,
                capacity=capacity,
                is_taken=is_taken,
                config=config,
                has_head=has_head,
            )
            self._embeddings.add(request)
        elif self.generates:
            check_request(
                request,
                vocab_size=vocab_size,
                capacity=capacity,
                is_taken=is_taken,
                unknown_ids=self._unknown_ids,
            )
            self._generation.add(request)
        else:
            raise InvalidRequest("this model has no lm_head: it generates nothing", code=UNSUPPORTED)

    def due_resume_states(self) -> dict[str, ResumeState]:
        """New resume states, by request id, of the requests with a sequence that got engine.checkpoint_tokens tokens
        since its last one. Calling this is optional: only the ids are kept until then.
        """
        return self._generation.due_resume_states()

    def resume_state(self, request_id: str) -> ResumeState | None:
        """A request as it stands; None if it is not unfinished, has generated nothing, or resume states are off."""
        return self._generation.resume_state(request_id)

    def abort(self, request_id: str) -> bool:
        """End a request now: its blocks are free when this returns, and its output has what it generated.

        Equal requests that wait for the same tokens still get all of them. False, and no change, for a request that is
        not unfinished.
        """
        return self._generation.abort(request_id) or self._embeddings.abort(request_id)

    def stats(self) -> EngineStats:
        """Figures at this moment."""
        return replace(
            super().stats(),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + self._generation.num_waiting_for_grammar,
            generated_tokens=self._generation.num_generated_tokens,
            drafted_tokens=self._scheduler.num_drafted_tokens,
            accepted_tokens=self._scheduler.num_accepted_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free_blocks,
            prefix_cache=self.model_interface.cache_metrics_snapshot(),
            decode_graphs=self._executor.graph_stats,
        )

    def check_integrity(self) -> None:
        """Raise EngineFatal if the account of the KV blocks does not add up."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """End every unfinished request as cancelled; `step` hands their outputs out."""
        self._generation.close()
        self._embeddings.close()
        self._in_flight = None  # nobody waits for it
        self.model_interface.reset()

    @property
    def _has_work(self) -> bool:
        has_sequences = self._scheduler.has_work or self._generation.num_waiting_for_grammar > 0
        return has_sequences or self._in_flight is not None

    def _advance(self) -> None:
        self._generation.take_compiled(may_wait=not self._scheduler.has_work and self._finished.is_empty)
        batch = self._scheduler.schedule(is_ahead=self._in_flight is not None)
        if batch is None and self._in_flight is not None:
            self._collect()
            batch = self._scheduler.schedule()
        launched = None if batch is None else self._launch(batch)
        self._collect()
        self._in_flight = launched
        if not self._runs_ahead:
            self._collect()

    def _launch(self, batch: ScheduledBatch) -> StepInFlight:
        self._num_steps += 1
        self._step_size = (len(batch.items), batch.num_tokens)
        try:
            return self._runner.launch(batch, self._in_flight)
        except EngineFatal as failure:
            # The step before has been computed: requests that ended in it get their outputs. But a faulty device is
            # not asked again, since each call may hang.
            if self._is_on_host or (failure.__cause__ is not None and is_out_of_memory(failure.__cause__)):
                with suppress(EngineFatal):
                    self._collect()
            raise

    def _collect(self) -> None:
        """Take the answers of the step under way, if there is one."""
        if self._in_flight is None:
            return
        answers = self._runner.collect(self._in_flight)
        self._in_flight = None
        outcomes = [*answers.tokens, *answers.vectors]
        self._scheduler.commit([item for item, _, answer in outcomes if not isinstance(answer, NonFiniteLogits)])
        for _, embedded, vector in answers.vectors:
            self._embeddings.take(embedded, vector)
        for _, state, answer in answers.tokens:
            self._generation.take(state, answer)
