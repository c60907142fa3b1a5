"""The requests for tokens of an engine."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace

from engine.errors import EngineError, NonFiniteLogits
from engine.finish_reason import FinishReason
from engine.finished_requests import FinishedRequests
from engine.held_groups import HeldGroups
from engine.loading.engine_parts import EngineParts
from engine.output_processor import OutputProcessor
from engine.request import Request
from engine.request_checkpoints import RequestCheckpoints
from engine.request_intake import RequestIntake
from engine.sampling.sampled_token import SampledToken
from engine.scheduling.group_table import GroupTable
from engine.scheduling.request_group import RequestGroup
from engine.scheduling.request_state import RequestState
from engine.scheduling.scheduler import Scheduler
from engine.structured.grammar_compiler import GrammarCompiler
from engine.token_checkpoint import TokenCheckpoint

KEY_BYTES = 16


class GenerationRequests:
    """Makes sequences of requests for tokens, takes what is generated for them and hands their outputs out.

    A request that is to get the same tokens as an unfinished one waits for these: one of the same tenant with the same
    prompt and parameters, greedy or with an explicit seed. Other draws are each request's own.
    """

    def __init__(
        self,
        parts: EngineParts,
        outputs: OutputProcessor,
        scheduler: Scheduler,
        finished: FinishedRequests,
        arrivals: Iterator[int],
    ) -> None:
        """`arrivals` is shared with whatever else queues sequences: they are told apart by these numbers."""
        settings, model = parts.effective.settings.engine, parts.executor.model
        self._scheduler = scheduler
        self._outputs = outputs
        self._finished = finished
        self._checkpoints = RequestCheckpoints(outputs, model, interval_tokens=settings.checkpoint_tokens)
        self._intake = RequestIntake(
            parts.block_manager,
            self._checkpoints,
            max_model_len=parts.runner.kv_capacity(),
            seed=settings.seed,
            arrivals=arrivals,
        )
        compiler = GrammarCompiler(
            parts.tokenizer,
            settings.structured_output,
            vocab_size=model.config.vocab_size,
            eos_token_ids=parts.eos_token_ids,
        )
        self._held = HeldGroups(compiler)
        self._deduplicate = settings.deduplicate
        self._groups: GroupTable[RequestGroup] = GroupTable()
        self.num_generated_tokens = 0  # sampled, whatever became of their requests

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this id is unfinished."""
        return request_id in self._groups

    @property
    def num_held_sequences(self) -> int:
        """Sequences that wait for a grammar, which the scheduler does not know yet."""
        return self._held.num_sequences

    def add(self, request: Request) -> None:
        """Queue a checked request, or wait for the tokens of an equal one.

        A checkpoint that an equal one brings is set aside: the work behind it is done for the other anyway.
        """
        key = _key_of(request) if self._deduplicate else None
        group = self._groups.join(replace(request, resume=None), key)
        if group is None:
            self._start(self._intake.begin(request, key))
        elif request.priority < group.priority and not self._held.promote(group, request.priority):
            for state in group.unfinished:
                self._scheduler.promote(state, request.priority)

    def take_compiled(self, *, may_wait: bool) -> None:
        """Schedule what no longer waits for its grammar. `may_wait`: a little, where there is nothing else to do."""
        for group, grammar in self._held.take_ready(may_wait=may_wait):
            if isinstance(grammar, EngineError):
                group.error = grammar
                self._cancel(group)
            else:
                for state in group.unfinished:
                    self._outputs.constrain(state, grammar)
                self._schedule(group)

    def take(self, state: RequestState, answer: SampledToken | FinishReason | EngineError | None) -> None:
        """What a step brought for a sequence: a token, its end, its failure, or nothing yet.

        Of a sequence that has ended, as when another of its request failed in this very step, nothing is taken.
        """
        if answer is None or state.is_finished:
            return
        if isinstance(answer, EngineError):
            self._fail(state, answer)
            return
        if isinstance(answer, FinishReason):
            state.finish_reason = answer  # its prompt was to be scored, not continued
        else:
            self._outputs.append(state, answer)
            if state.first_token_s is None:
                state.first_token_s = time.monotonic()
            self.num_generated_tokens += 1
            self._checkpoints.note_token(state)
        if state.finish_reason is not None:
            self._scheduler.finish(state)
            self._hand_out_if_complete(self._groups.of(state))

    def due_checkpoints(self) -> dict[str, TokenCheckpoint]:
        """See Engine."""
        return self._checkpoints.take_due(self._groups)

    def checkpoint(self, request_id: str) -> TokenCheckpoint | None:
        """See Engine."""
        group = self._groups.find(request_id)
        return None if group is None else self._checkpoints.take_now(group)

    def abort(self, request_id: str) -> bool:
        """End a request with what was generated; False for one that is not unfinished. Equal requests keep the work."""
        group = self._groups.find(request_id)
        if group is None:
            return False
        if len(group.requests) > 1:
            self._withdraw(group.request_named(request_id), group)
        else:
            self._cancel(group)
        return True

    def close(self) -> None:
        """Abort all of them, and give back what compiles grammars."""
        for group in self._groups:
            self._cancel(group)
        self._held.close()

    def _start(self, group: RequestGroup) -> None:
        self._groups.add(group)
        if not self._held.hold(group):
            self._schedule(group)

    def _schedule(self, group: RequestGroup) -> None:
        group.choose_scorer()
        for state in group.unfinished:
            self._scheduler.add(state)
        self._hand_out_if_complete(group)

    def _fail(self, state: RequestState, error: EngineError) -> None:
        """One sequence failed, so its request did; KV that is not good is withdrawn."""
        group = self._groups.of(state)
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

    def _withdraw(self, request: Request, group: RequestGroup) -> None:
        """End one of several requests that wait for a group: the work done so far is the others'."""
        copy = self._intake.copy_for(request, group)
        for state in copy.unfinished:
            self._end(state)
        self._finished.add(request, copy, tuple(self._outputs.completion(state) for state in copy.states))
        self._groups.withdraw(request)

    def _end(self, state: RequestState) -> None:
        self._outputs.flush(state)
        state.finish_reason = FinishReason.CANCELLED

    def _hand_out_if_complete(self, group: RequestGroup) -> None:
        if not group.is_complete:
            return
        self._groups.drop(group)
        self._checkpoints.forget(group)
        completions = tuple(self._outputs.completion(state) for state in group.states)
        ended, others = group.parted(group.error)
        for request in ended:
            self._finished.add(request, group, completions)
        if others:
            self._start(self._intake.begin_again(group, others))


def _key_of(request: Request) -> bytes | None:
    """Names a request's tokens, and how its grammar is spoken of; None where no other request may get them."""
    params = request.params
    if not params.is_greedy and params.seed is None:
        return None
    digest = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=KEY_BYTES)
    grammar_param = None if params.grammar is None else params.grammar.param  # not in repr(params); refusals name it
    digest.update(repr((request.tenant, params, grammar_param)).encode("utf-8", "surrogatepass"))
    return digest.digest()
