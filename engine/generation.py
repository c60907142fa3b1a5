"""Keeps the unfinished requests for tokens.

A request becomes a group of `n` sequences, each with draws of its own. Requests with a grammar wait until that is
compiled.
"""

from __future__ import annotations

import hashlib
import random
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.errors import EngineError, EngineFatal, InvalidRequest
from engine.execution.forward import StepExecutor
from engine.kv_cache.block_manager import BlockManager
from engine.model_interface import ModelInterface
from engine.outputs import FinishedRequests, OutputProcessor
from engine.request import FinishReason, PromptLogprobs, Request, RequestOutput, ResumeState
from engine.resume import ResumeStates
from engine.sampler import SampledToken, VerifiedTokens
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import RequestState, TokenCounts
from engine.structured.compiler import GrammarCompiler
from engine.structured.grammar import Grammar
from engine.structured.matcher import CompiledGrammar
from engine.text.tokenizer import Tokenizer
from engine.unfinished import KEY_BYTES, RequestGroup, SequenceQueue, UnfinishedRequests
from settings import EffectiveSettings

SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: keeps the streams of a request's n sequences apart

WAIT_S = 0.01  # for a grammar, in a step that has nothing to run

_SCORED = SamplingParams(max_tokens=0, temperature=0.0)  # of a sequence that is scored, not continued


@dataclass(frozen=True, eq=False)
class EngineParts:
    """What an engine is built from: loaded, warmed up, with one block manager."""

    effective: EffectiveSettings  # fully derived
    executor: StepExecutor
    model_interface: ModelInterface
    block_manager: BlockManager
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    embedding: EmbeddingConfig


class GenerationRequests(
    UnfinishedRequests[Request, RequestState, RequestGroup, SampledToken | VerifiedTokens | FinishReason]
):
    """Makes sequences of requests for tokens, takes what is generated for them and hands their outputs out.

    Requests are equal if they have the same tenant, prompt and parameters, and are greedy or have an explicit seed. All
    others are drawn on their own.
    """

    def __init__(
        self,
        parts: EngineParts,
        outputs: OutputProcessor,
        queue: SequenceQueue[RequestState],
        finished: FinishedRequests,
        arrivals: Iterator[int],
    ) -> None:
        """arrivals: numbers the groups; shared with the engine's other requests."""
        super().__init__(queue, finished)
        settings, model = parts.effective.settings.engine, parts.executor.model
        self._outputs = outputs
        self._resume_states = ResumeStates(outputs, model, interval_tokens=settings.checkpoint_tokens)
        self._intake = RequestIntake(
            parts.block_manager,
            self._resume_states,
            max_model_len=parts.model_interface.kv_capacity(),
            seed=settings.seed,
            arrivals=arrivals,
        )
        compiler = GrammarCompiler(
            parts.tokenizer,
            settings.structured_output,
            vocab_size=model.config.vocab_size,
            eos_token_ids=parts.eos_token_ids,
        )
        self._waiting_room = GrammarWaitingRoom(compiler)
        self._deduplicate = settings.deduplicate
        self.num_generated_tokens = 0  # also those of requests that failed or were aborted

    @property
    def num_waiting_for_grammar(self) -> int:
        """Sequences that wait for a grammar. The scheduler does not know them yet."""
        return self._waiting_room.num_sequences

    def add(self, request: Request) -> None:
        """Queue a checked request, or wait for the tokens of an equal one; a resume state is not needed then."""
        key = _key_of(request) if self._deduplicate else None
        if not self._join(replace(request, resume=None), key):
            self._start(self._intake.begin(request, key))

    def take_compiled(self, *, may_wait: bool) -> None:
        """Queue the groups whose grammar is ready. may_wait: wait for one up to WAIT_S."""
        for group, grammar in self._waiting_room.take_ready(may_wait=may_wait):
            if isinstance(grammar, EngineError):
                group.error = grammar
                self._cancel(group)
            else:
                for state in group.answering:
                    if state.finish_reason in {None, FinishReason.LENGTH}:
                        self._outputs.constrain(state, grammar)
                self._schedule(group)

    def due_resume_states(self) -> dict[str, ResumeState]:
        """See Engine."""
        return self._resume_states.take_due(self._groups)

    def resume_state(self, request_id: str) -> ResumeState | None:
        """See Engine."""
        group = self._groups.find(request_id)
        return None if group is None else self._resume_states.take_now(group)

    def close(self) -> None:
        """Abort all of them, and stop compiling grammars."""
        super().close()
        self._waiting_room.close()

    def _enqueue(self, group: RequestGroup) -> None:
        if not self._waiting_room.take_in(group):
            self._schedule(group)

    def _schedule(self, group: RequestGroup) -> None:
        group.choose_scorer()
        super()._enqueue(group)

    def _promote(self, group: RequestGroup, priority: int) -> None:
        if not self._waiting_room.promote(group, priority):
            super()._promote(group, priority)

    def _dequeue(self, group: RequestGroup) -> None:
        if not self._waiting_room.release(group):
            super()._dequeue(group)

    def _apply(self, state: RequestState, answer: SampledToken | VerifiedTokens | FinishReason) -> bool:
        if isinstance(answer, VerifiedTokens):  # an end among them drops the rest
            return any(self._apply(state, sampled) for sampled in answer.tokens)
        if isinstance(answer, FinishReason):
            state.finish_reason = answer  # its prompt was to be scored, not continued
            return True
        self._outputs.append(state, answer)
        if state.first_token_s is None:
            state.first_token_s = time.monotonic()
        self.num_generated_tokens += 1
        self._resume_states.note_token(state)
        return state.finish_reason is not None

    def _end(self, state: RequestState) -> None:
        self._outputs.flush(state)
        state.finish_reason = FinishReason.CANCELLED

    def _output(self, group: RequestGroup) -> RequestOutput:
        self._resume_states.forget(group)
        completions = tuple(self._outputs.completion(state) for state in group.answering)
        has_failed = group.error is not None
        return RequestOutput(
            request_id=group.request.request_id,
            num_prompt_tokens=group.request.num_prompt_tokens,
            num_cached_tokens=group.states[0].num_cached_tokens,
            completions=() if has_failed else completions,
            error=group.error,
            num_resumed_tokens=group.num_resumed_tokens,
            prompt_logprobs=None if has_failed else group.prompt_logprobs,
            continuation_logprobs=() if has_failed else group.continuation_logprobs,
            timings=group.timings_now(),
        )

    def _ended_copy(self, request: Request, group: RequestGroup) -> RequestGroup:
        """All of its prompt counts as cached: the group's other requests are charged with the work."""
        copy = self._intake.new_group([request], group.base_seed, None)
        copy.states[0].num_cached_tokens = copy.states[0].num_prompt_tokens
        copy.num_resumed_tokens = group.num_resumed_tokens
        self._resume_states.copy_progress(group, copy.answering)
        for state in copy.unfinished:
            self._end(state)
        return copy

    def _begin_again(self, group: RequestGroup, requests: list[Request]) -> RequestGroup:
        return self._intake.new_group(requests, group.base_seed, group.key)  # the same draws, from the prompt on


def _key_of(request: Request) -> bytes | None:
    """The same for requests that get the same tokens and errors; None where no other request may share them."""
    params = request.params
    if not params.is_greedy and params.seed is None:
        return None
    digest = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=KEY_BYTES)
    grammar_param = None if params.grammar is None else params.grammar.param  # not in repr(params), but in errors
    digest.update(repr((request.tenant, params, grammar_param, request.goes_on)).encode("utf-8", "surrogatepass"))
    digest.update(request.continuation_bytes)
    return digest.digest()


class RequestIntake:
    """Makes groups, new ones and ones that go on from a resume state."""

    def __init__(
        self,
        blocks: BlockManager,
        resume_states: ResumeStates,
        *,
        max_model_len: int,
        seed: int | None,
        arrivals: Iterator[int],
    ) -> None:
        self._blocks = blocks
        self._resume_states = resume_states
        self._max_model_len = max_model_len
        self._entropy = random.SystemRandom() if seed is None else random.Random(seed)
        self._arrivals = arrivals

    def begin(self, request: Request, key: bytes | None) -> RequestGroup:
        """A group for a checked request, which goes on from the request's resume state if there is one.

        Prompt and tokens so far are then prefilled as after a preemption. A resume state that is damaged, or that is
        not of this request, is dropped with a warning.
        """
        resume_state = self._resume_states.usable(request)
        request = replace(request, resume=None)  # may be large: not kept for the request's life
        if resume_state is not None:
            group = self.new_group([request], resume_state.base_seed, key)
            if self._resume_states.restore(resume_state, group.answering):
                group.num_resumed_tokens = resume_state.num_tokens
                for state in group.unfinished:
                    state.chain = self._blocks.new_chain(state.token_ids, request.tenant)
                return group
        seed = request.params.seed
        return self.new_group([request], self._entropy.getrandbits(63) if seed is None else seed, key)

    def new_group(self, requests: list[Request], base_seed: int, key: bytes | None) -> RequestGroup:
        """A group for equal requests, from their prompt on."""
        request, arrival = requests[0], next(self._arrivals)
        params, room = request.params, self._max_model_len - len(request.prompt_token_ids)
        states = tuple(
            RequestState(
                request=request,
                index=index,
                arrival=arrival,
                seed=_signed_64(base_seed + index * SEED_STRIDE),
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                chain=self._blocks.new_chain(request.prompt_token_ids, request.tenant),
                token_ids=list(request.prompt_token_ids),
                counts=TokenCounts(request.prompt_token_ids) if params.has_penalties else None,
            )
            for index in range(params.n)
        )
        if params.prompt_logprobs is not None:  # one sequence is enough: all have the same prompt
            states[0].prompt_logprobs = PromptLogprobs(request.prompt_token_ids, params.prompt_logprobs)
        for state in states:
            if state.max_tokens == 0 and not state.scores_prompt:
                state.finish_reason = FinishReason.LENGTH  # there is nothing to run
        scored = (self._scored(states[0], number) for number in range(len(request.continuations)))
        return RequestGroup(requests, (*states, *scored), key, base_seed=base_seed)

    def _scored(self, answering: RequestState, number: int) -> RequestState:
        """A sequence of prompt and continuation, as a prompt that is scored behind the request's: this comes from the
        prefix cache, if there is one, and another sequence computes it.
        """
        request = answering.request
        token_ids = [*request.prompt_token_ids, *request.continuations[number]]  # nothing is appended to these
        return RequestState(
            request=replace(request, prompt_token_ids=token_ids, params=_SCORED, continuations=()),
            index=request.params.n + number,
            arrival=answering.arrival,
            seed=0,
            max_tokens=0,
            chain=self._blocks.branch_chain(answering.chain, token_ids),
            token_ids=token_ids,
            prompt_logprobs=PromptLogprobs(token_ids, 0, num_given=request.num_prompt_tokens),
        )


def _signed_64(value: int) -> int:
    """The low 64 bits as a signed number: what an int64 tensor holds."""
    return (value + 2**63) % 2**64 - 2**63


class GrammarWaitingRoom:
    """Holds back groups until their grammar is compiled, while others are run."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        """The compiler is closed with it."""
        self._compiler = compiler
        self._waiting: dict[int, tuple[RequestGroup, Future[CompiledGrammar]]] = {}  # by arrival

    @property
    def num_sequences(self) -> int:
        """Sequences that wait here."""
        return sum(len(group.unfinished) for group, _ in self._waiting.values())

    def take_in(self, group: RequestGroup) -> bool:
        """Have its grammar compiled; False for a group that has none, or has ended."""
        grammar = group.request.params.grammar
        if grammar is None or group.is_complete:
            return False
        self._waiting[group.arrival] = (group, self._compiler.compile(grammar))
        return True

    def promote(self, group: RequestGroup, priority: int) -> bool:
        """Make a group more urgent; False if it does not wait here."""
        if group.arrival not in self._waiting:
            return False
        for state in group.states:
            state.priority = priority
        return True

    def release(self, group: RequestGroup) -> bool:
        """Let a group go; False if it does not wait here. Its grammar is no longer compiled if no other group waits for
        it and compiling has not begun.
        """
        _, future = self._waiting.pop(group.arrival, (None, None))
        if future is None:
            return False
        if not future.done() and all(other is not future for _, other in self._waiting.values()):
            future.cancel()
        return True

    def take_ready(self, *, may_wait: bool) -> list[tuple[RequestGroup, CompiledGrammar | EngineError]]:
        """Groups that need not wait any longer, in the order they came, with their grammar or the error it is refused
        with. Those with an error stay here until they are released.
        """
        if not self._waiting:
            return []
        if may_wait:
            wait({future for _, future in self._waiting.values()}, WAIT_S, FIRST_COMPLETED)
        ready = [(group, _outcome(group, future)) for group, future in self._waiting.values() if future.done()]
        for group, outcome in ready:
            if isinstance(outcome, CompiledGrammar):
                self.release(group)
        return ready

    def close(self) -> None:
        """Stop compiling grammars."""
        self._compiler.close()


def _outcome(group: RequestGroup, future: Future[CompiledGrammar]) -> CompiledGrammar | EngineError:
    error = future.exception()
    return future.result() if error is None else _error_of(group.request.params.grammar, error)


def _error_of(grammar: Grammar | None, error: BaseException) -> EngineError:
    if isinstance(error, InvalidRequest):
        param = None if grammar is None else grammar.param
        return InvalidRequest(f"{param} {error}", param=param, code=error.code)
    if isinstance(error, EngineError):
        return error
    return EngineFatal(f"compiling a grammar failed: {type(error).__name__}: {error}")
