"""Prompts in, tokens out."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from engine.admission import check_request
from engine.engine_stats import EngineStats
from engine.errors import EngineError, EngineFatal, NonFiniteLogits
from engine.execution.forward_item import ForwardItem
from engine.finish_reason import FinishReason
from engine.loading.engine_parts import EngineParts
from engine.loading.load_parts import load_parts
from engine.output_processor import OutputProcessor
from engine.request import Request
from engine.request_checkpoints import RequestCheckpoints
from engine.request_output import RequestOutput
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampled_token import SampledToken
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_row import SamplingRow
from engine.sampling.token_counts import TokenCounts
from engine.scheduling.request_group import RequestGroup
from engine.scheduling.request_state import RequestState
from engine.scheduling.scheduled_batch import ScheduledBatch
from engine.scheduling.scheduled_item import ScheduledItem
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.text.tokenizer import Tokenizer
from engine.token_checkpoint import TokenCheckpoint
from settings import EffectiveSettings, Settings

SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: keeps the streams of a request's n sequences apart


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
        self._scheduler = Scheduler(
            SchedulerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, settings.unified_prefill),
            parts.block_manager,
        )
        unknown_ids = torch.tensor(parts.tokenizer.unknown_ids(self.vocab_size), dtype=torch.int64)
        self._sampler = Sampler(parts.executor.model.ops, unknown_ids.to(parts.executor.model.device))
        self._outputs = OutputProcessor(parts.tokenizer, parts.eos_token_ids)
        self._checkpoints = RequestCheckpoints(
            self._outputs,
            parts.executor.model,
            interval_tokens=settings.checkpoint_tokens,
            deterministic=settings.deterministic,
        )
        self._groups: dict[str, RequestGroup] = {}
        self._ready: list[RequestOutput] = []
        self._entropy = random.SystemRandom() if settings.seed is None else random.Random(settings.seed)
        self._arrivals = 0
        self._num_steps = self._num_finished = self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._generated_tokens = 0

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

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest (PromptTooLong, ...) for one that can never be served.

        One with a checkpoint goes on behind it: prompt and tokens so far are prefilled as after a preemption. A
        checkpoint of anything else, or a damaged one, is dropped with a warning and the request starts over.
        """
        check_request(request, vocab_size=self.vocab_size, capacity=self.max_model_len, taken=self._groups)
        checkpoint = self._checkpoints.usable(request)
        request = replace(request, resume=None)  # may be large: not kept for the request's life
        base_seed = self._base_seed(request) if checkpoint is None else checkpoint.base_seed
        states = self._new_states(request, base_seed)
        if checkpoint is not None and not self._checkpoints.restore(checkpoint, states):
            checkpoint, states = None, self._new_states(request, base_seed)
        self._arrivals += 1
        group = self._groups[request.request_id] = RequestGroup(request, states, base_seed)
        group.num_resumed_tokens = 0 if checkpoint is None else checkpoint.num_tokens
        for state in group.unfinished:
            if state.num_output_tokens:
                state.chain = self._blocks.new_chain(state.token_ids, request.cache_salt)
            self._scheduler.add(state)
        self._hand_out_if_complete(group)

    def _base_seed(self, request: Request) -> int:
        seed = request.params.seed
        return self._entropy.getrandbits(63) if seed is None else seed

    def _new_states(self, request: Request, base_seed: int) -> tuple[RequestState, ...]:
        room = self.max_model_len - len(request.prompt_token_ids)
        return tuple(
            RequestState(
                request=request,
                index=index,
                arrival=self._arrivals,
                seed=_signed_64(base_seed + index * SEED_STRIDE),
                max_tokens=min(request.params.max_tokens or room, room),
                chain=self._blocks.new_chain(request.prompt_token_ids, request.cache_salt),
                token_ids=list(request.prompt_token_ids),
                counts=TokenCounts(request.prompt_token_ids) if request.params.has_penalties else None,
            )
            for index in range(request.params.n)
        )

    def due_checkpoints(self) -> dict[str, TokenCheckpoint]:
        """Checkpoints, by request id, of the requests of which a sequence got engine.checkpoint_tokens since its last
        one. Nobody needs to ask: what is due is kept as one id a request until then.
        """
        return self._checkpoints.take_due(self._groups)

    def checkpoint(self, request_id: str) -> TokenCheckpoint | None:
        """A request as it stands; None if it is not unfinished, has generated nothing, or checkpoints are off."""
        group = self._groups.get(request_id)
        return None if group is None else self._checkpoints.take_now(group)

    def abort(self, request_id: str) -> bool:
        """End a request now: its blocks are free when this returns, what it generated is in its output.

        False, and no change, for a request that is not unfinished.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        self._end(group, FinishReason.CANCELLED)
        return True

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of the requests that ended since the last call, aborted ones included.

        Raises EngineFatal when the step itself failed (out of memory, a fault of the device): stop the engine then.
        """
        batch = self._scheduler.schedule()
        if batch is not None:
            self._run(batch)
        ready, self._ready = self._ready, []
        return ready

    def has_unfinished(self) -> bool:
        """Whether `step` has something to run or to hand out."""
        return self._scheduler.has_work or bool(self._ready)

    def stats(self) -> EngineStats:
        """Figures at this moment."""
        return EngineStats(
            num_steps=self._num_steps,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_finished_requests=self._num_finished,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            generated_tokens=self._generated_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free_blocks,
        )

    def check_integrity(self) -> None:
        """Raise EngineFatal if the account of the KV blocks does not add up."""
        self._blocks.check_integrity()

    def close(self) -> None:
        """End every unfinished request as cancelled; `step` hands their outputs out."""
        for group in list(self._groups.values()):
            self._end(group, FinishReason.CANCELLED)
        self.runner.reset()

    def _run(self, batch: ScheduledBatch) -> None:
        self._num_steps += 1
        results = self._forward_and_sample(batch)
        outcomes = list(zip(batch.items, results, strict=True))
        self._scheduler.advance(item for item, result in outcomes if not isinstance(result, NonFiniteLogits))
        for item, result in outcomes:
            state = item.state
            if (
                result is None or state.is_finished
            ):  # a chunk, or a sibling of the same request failed in this very step
                continue
            if isinstance(result, NonFiniteLogits):
                self._fail(state, result)
                continue
            self._outputs.append(state, result)
            self._generated_tokens += 1
            self._checkpoints.note_token(state)
            if state.finish_reason is not None:
                self._scheduler.finish(state)
                self._hand_out_if_complete(self._groups[state.request.request_id])

    def _forward_and_sample(self, batch: ScheduledBatch) -> list[SampledToken | NonFiniteLogits | None]:
        """What model and sampler answer for each item; None for a chunk that is not its prompt's last.

        Whatever else goes wrong there leaves KV nobody can vouch for. A chunk's last token sees all of its others, so
        its logits tell whether the chunk's KV is good: without that look, NaN would be offered to other requests
        before their own request fails.
        """
        try:
            logits = self._executor.execute([self._forward_item(item) for item in batch.items])
            rows = [self._sampling_row(item.state) for item in batch.sampling_items]
            if len(rows) == len(batch.items):  # nearly always: the logits, up to 40 MB, are not copied
                return list(self._sampler.sample(logits, rows))
            samples = torch.tensor([item.samples for item in batch.items], device=logits.device)
            sampled = iter(self._sampler.sample(logits[samples], rows) if rows else [])
            chunks = iter(torch.isfinite(logits[~samples].amax(dim=-1)).tolist())
        except Exception as error:
            self.runner.mark_failed(f"{type(error).__name__}: {error}")
            raise EngineFatal(f"a step failed: {type(error).__name__}: {error}") from error
        return [next(sampled) if item.samples else _of_chunk(item, is_good=next(chunks)) for item in batch.items]

    def _forward_item(self, item: ScheduledItem) -> ForwardItem:
        state = item.state
        tokens = state.token_ids[item.start : item.start + item.num_scheduled_tokens]
        return ForwardItem(tokens, item.start, self._blocks.block_table(state.sequence_id), wants_logits=True)

    def _sampling_row(self, state: RequestState) -> SamplingRow:
        return SamplingRow(
            params=state.request.params,
            position=len(state.token_ids),
            seed=state.seed,
            counts=state.counts,
            banned_token_ids=self._outputs.banned_token_ids(state),
        )

    def _fail(self, state: RequestState, error: EngineError) -> None:
        """One sequence failed, so its request did; its KV is withdrawn from later hits."""
        group = self._groups[state.request.request_id]
        group.error = error
        state.finish_reason = FinishReason.ERROR
        self._scheduler.finish(state, kv_is_good=False)
        self._end(group, FinishReason.CANCELLED)

    def _end(self, group: RequestGroup, reason: FinishReason) -> None:
        for state in group.unfinished:
            self._outputs.flush(state)
            state.finish_reason = reason
            self._scheduler.finish(state)
        self._hand_out_if_complete(group)

    def _hand_out_if_complete(self, group: RequestGroup) -> None:
        if group.unfinished:
            return
        del self._groups[group.request.request_id]
        self._checkpoints.forget(group.request.request_id)
        completions = tuple(self._outputs.completion(state) for state in group.states)
        first = group.states[0]
        self._num_finished += 1
        self._prompt_tokens += first.num_prompt_tokens
        self._cached_tokens += first.num_cached_tokens
        self._output_tokens += sum(state.num_output_tokens for state in group.states)
        self._ready.append(
            RequestOutput(
                request_id=group.request.request_id,
                num_prompt_tokens=first.num_prompt_tokens,
                num_cached_tokens=first.num_cached_tokens,
                completions=() if group.error is not None else completions,
                error=group.error,
                num_resumed_tokens=group.num_resumed_tokens,
            )
        )


def _of_chunk(item: ScheduledItem, *, is_good: bool) -> NonFiniteLogits | None:
    end = item.start + item.num_scheduled_tokens
    return None if is_good else NonFiniteLogits(f"the model's values are not finite before position {end}")


def _signed_64(value: int) -> int:
    """The low 64 bits as a signed number: what an int64 tensor holds."""
    return (value + 2**63) % 2**64 - 2**63
