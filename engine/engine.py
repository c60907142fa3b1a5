"""Prompts in, tokens out."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import torch

from engine.admission import check_embedding_request, check_request
from engine.any_request import AnyRequest
from engine.batch_runner import BatchRunner
from engine.duplicates import Duplicates
from engine.embedding.embedding_requests import EmbeddingRequests
from engine.embedding_request import EmbeddingRequest
from engine.engine_stats import EngineStats
from engine.errors import EngineError, InvalidRequest, NonFiniteLogits
from engine.finish_reason import FinishReason
from engine.finished_requests import FinishedRequests
from engine.loading.engine_parts import EngineParts
from engine.loading.load_parts import load_parts
from engine.output_processor import OutputProcessor
from engine.request_checkpoints import RequestCheckpoints
from engine.request_intake import RequestIntake
from engine.request_output import RequestOutput
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampled_token import SampledToken
from engine.sampling.sampler import Sampler
from engine.scheduling.request_group import RequestGroup
from engine.scheduling.request_state import RequestState
from engine.scheduling.scheduled_batch import ScheduledBatch
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.structured.held_groups import HeldGroups
from engine.text.tokenizer import Tokenizer
from engine.token_checkpoint import TokenCheckpoint
from settings import EffectiveSettings, Settings


class Engine:
    """Runs requests together, step by step. Single-threaded: whoever made it calls it.

    Every added request ends in exactly one RequestOutput, handed out by `step`.
    """

    def __init__(self, parts: EngineParts) -> None:
        settings = parts.effective.settings.engine
        self.effective: EffectiveSettings = parts.effective
        self.tokenizer: Tokenizer = parts.tokenizer
        self.runner: ModelRunner = parts.runner
        self.eos_token_ids: frozenset[int] = parts.eos_token_ids
        self.vocab_size: int = parts.executor.model.config.vocab_size  # token ids are below it
        self._executor = parts.executor
        self._blocks = parts.block_manager
        limits = SchedulerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.unified_prefill)
        self._scheduler = Scheduler(limits, parts.block_manager)
        unknown_ids = torch.tensor(parts.tokenizer.unknown_ids(self.vocab_size), dtype=torch.int64)
        self._sampler = Sampler(parts.executor.model.ops, unknown_ids.to(parts.executor.model.device))
        self._outputs = OutputProcessor(parts.tokenizer, parts.eos_token_ids)
        self._batches = BatchRunner(parts.executor, parts.runner, parts.block_manager, self._outputs, self._sampler)
        self._checkpoints = RequestCheckpoints(
            self._outputs, parts.executor.model, interval_tokens=settings.checkpoint_tokens
        )
        arrivals = count(1)
        self._intake = RequestIntake(
            parts.block_manager,
            self._checkpoints,
            max_model_len=self.max_model_len,
            seed=settings.seed,
            arrivals=arrivals,
        )
        self._duplicates = Duplicates(is_on=settings.deduplicate)
        self._held = HeldGroups(parts, self._outputs)
        self._finished = FinishedRequests()
        self._embeddings = EmbeddingRequests(
            self._scheduler,
            self._finished,
            parts.block_manager.new_chain,
            config=parts.embedding,
            arrivals=arrivals,
            deduplicate=settings.deduplicate,
        )
        self._groups: dict[str, RequestGroup] = {}  # by the ids of their requests
        self._groups_by_arrival: dict[int, RequestGroup] = {}
        self._num_steps = self._generated_tokens = 0

    @classmethod
    def load(cls, effective: EffectiveSettings) -> Engine:
        """Derive what is not set, load the model, warm it up.

        Raises CheckpointError, CapabilityError (a setting this device or build cannot honour), NonFiniteLogits.
        """
        return cls(load_parts(effective))

    @property
    def settings(self) -> Settings:
        """What the engine holds, derived values included."""
        return self.effective.settings

    @property
    def max_model_len(self) -> int:
        """Tokens one request may have, prompt and output together."""
        return self.runner.kv_capacity()

    @property
    def generates(self) -> bool:
        """Whether it continues prompts. False for a model without a head: it makes embeddings only."""
        return self._executor.model.lm_head is not None

    def add_request(self, request: AnyRequest) -> None:
        """Queue a request. Raises InvalidRequest (PromptTooLong, ...) for one that can never be served.

        One that is to get the same tokens as an unfinished one (see Duplicates) gets what that one generates; a
        checkpoint it brings is set aside, since the work behind it is done for the other anyway.
        """
        taken = self._embeddings if request.request_id in self._embeddings else self._groups
        limits = {"vocab_size": self.vocab_size, "capacity": self.max_model_len}
        if isinstance(request, EmbeddingRequest):
            check_embedding_request(request, **limits, taken=taken, config=self._embeddings.config)
            self._embeddings.add(request)
            return
        if not self.generates:
            raise InvalidRequest("this model has no lm_head: it makes embeddings only", code="unsupported_endpoint")
        check_request(request, **limits, taken=taken)
        key = self._duplicates.key_of(request)
        group = self._duplicates.find(key)
        if group is None:
            self._start(self._intake.begin(request, key))
            return
        group.requests.append(replace(request, resume=None))
        self._groups[request.request_id] = group
        if request.priority < group.priority and not self._held.promote(group, request.priority):
            for state in group.unfinished:
                self._scheduler.promote(state, request.priority)

    def _start(self, group: RequestGroup) -> None:
        self._groups_by_arrival[group.arrival] = group
        self._groups.update(dict.fromkeys((request.request_id for request in group.requests), group))
        self._duplicates.add(group)
        if not self._held.hold(group):
            self._schedule(group)

    def _schedule(self, group: RequestGroup) -> None:
        for state in group.unfinished:
            self._scheduler.add(state)
        self._hand_out_if_complete(group)

    def _take_compiled(self) -> None:
        may_wait = not self._scheduler.has_work and self._finished.is_empty
        for group in self._held.take_ready(may_wait=may_wait):
            if group.error is not None:
                self._cancel(group)
            else:
                self._schedule(group)

    def due_checkpoints(self) -> dict[str, TokenCheckpoint]:
        """Checkpoints, by request id, of the requests of which a sequence got engine.checkpoint_tokens since its last
        one. Nobody needs to ask: what is due is kept as one id a request until then.
        """
        return self._checkpoints.take_due(self._groups_by_arrival)

    def checkpoint(self, request_id: str) -> TokenCheckpoint | None:
        """A request as it stands; None if it is not unfinished, has generated nothing, or checkpoints are off."""
        group = self._groups.get(request_id)
        return None if group is None else self._checkpoints.take_now(group)

    def abort(self, request_id: str) -> bool:
        """End a request now: its blocks are free when this returns, what it generated is in its output.

        Where others wait for the same tokens, these are generated on. False, and no change, for a request that is not
        unfinished.
        """
        group = self._groups.get(request_id)
        if group is None:
            return self._embeddings.abort(request_id)
        if len(group.requests) > 1:
            self._withdraw(request_id, group)
        else:
            self._cancel(group)
        return True

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of the requests that ended since the last call, aborted ones included.

        Raises EngineFatal when the step itself failed (out of memory, a fault of the device): stop the engine then.
        """
        self._take_compiled()
        batch = self._scheduler.schedule()
        if batch is not None:
            self._run(batch)
        return self._finished.take()

    def has_unfinished(self) -> bool:
        """Whether `step` has something to run or to hand out."""
        return self._scheduler.has_work or bool(self._held) or not self._finished.is_empty

    def stats(self) -> EngineStats:
        """Figures at this moment."""
        return EngineStats(
            num_steps=self._num_steps,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + self._held.num_sequences,
            num_finished_requests=self._finished.num_requests,
            num_duplicates=self._finished.num_duplicates,
            prompt_tokens=self._finished.prompt_tokens,
            cached_tokens=self._finished.cached_tokens,
            output_tokens=self._finished.output_tokens,
            generated_tokens=self._generated_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free_blocks,
        )

    def check_integrity(self) -> None:
        """Raise EngineFatal if the account of the KV blocks does not add up."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """End every unfinished request as cancelled; `step` hands their outputs out."""
        for group in list(self._groups_by_arrival.values()):
            self._cancel(group)
        self._embeddings.close()
        self._held.close()
        self.runner.reset()

    def _run(self, batch: ScheduledBatch) -> None:
        self._num_steps += 1
        answers = self._batches.run(batch)
        outcomes = (*answers.tokens, *answers.hidden)
        self._scheduler.advance(item for item, _, answer in outcomes if not isinstance(answer, NonFiniteLogits))
        for item, embedded, hidden in answers.hidden:
            self._embeddings.take(embedded, item.start, hidden)
        for _, state, answer in answers.tokens:
            # A chunk, or a sequence whose sibling failed in this very step.
            if answer is None or state.is_finished:
                continue
            if isinstance(answer, EngineError):
                self._fail(state, answer)
            else:
                self._append(state, answer)

    def _append(self, state: RequestState, answer: SampledToken | FinishReason) -> None:
        if isinstance(answer, FinishReason):
            state.finish_reason = answer  # its prompt was to be scored, not continued
        else:
            self._outputs.append(state, answer)
            self._generated_tokens += 1
            self._checkpoints.note_token(state)
        if state.finish_reason is not None:
            self._scheduler.finish(state)
            self._hand_out_if_complete(self._groups_by_arrival[state.arrival])

    def _fail(self, state: RequestState, error: EngineError) -> None:
        """One sequence failed, so its request did; KV that is not good is withdrawn. Equal requests try again."""
        group = self._groups_by_arrival[state.arrival]
        group.error = error
        state.finish_reason = FinishReason.ERROR
        self._scheduler.finish(state, kv_is_good=not isinstance(error, NonFiniteLogits))
        self._cancel(group)

    def _cancel(self, group: RequestGroup) -> None:
        is_held = self._held.release(group)
        for state in group.unfinished:
            self._end(state)
            if not is_held:
                self._scheduler.finish(state)
        self._hand_out_if_complete(group)

    def _withdraw(self, request_id: str, group: RequestGroup) -> None:
        """End one of several requests that wait for a group: the work done so far is the others'."""
        request = next(request for request in group.requests if request.request_id == request_id)
        copy = self._intake.copy_for(request, group)
        for state in copy.unfinished:
            self._end(state)
        self._finished.add(request, copy, tuple(self._outputs.completion(state) for state in copy.states))
        group.requests = [other for other in group.requests if other is not request]
        del self._groups[request_id]

    def _end(self, state: RequestState) -> None:
        self._outputs.flush(state)
        state.finish_reason = FinishReason.CANCELLED

    def _hand_out_if_complete(self, group: RequestGroup) -> None:
        if group.unfinished:
            return
        del self._groups_by_arrival[group.arrival]
        self._checkpoints.forget(group)
        self._duplicates.forget(group)
        completions = tuple(self._outputs.completion(state) for state in group.states)
        done = group.requests if group.error is None else group.requests[:1]
        for request in done:
            del self._groups[request.request_id]
            self._finished.add(request, group, completions)
        group.requests = group.requests[len(done) :]
        if group.requests:  # the first failed: the others are tried without it
            self._start(self._intake.begin_again(group))
