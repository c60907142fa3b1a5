"""Takes the resume states of unfinished requests, and goes on from them.

A resume state has the tokens, the base seed and a digest of model, prompt and parameters: the rest follows by replaying
the tokens. One of another model or request is dropped with a warning, and the request starts over.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from array import array
from collections.abc import Sequence
from functools import cached_property

from engine.models.decoder import DecoderModel
from engine.outputs import OutputProcessor
from engine.request import Request, ResumeState, SequenceResumeState
from engine.sampler import SampledToken
from engine.scheduling.sequence import RequestState
from engine.unfinished import GroupTable, RequestGroup

logger = logging.getLogger(__name__)


class ResumeStates:
    """Knows which requests are due for a resume state, takes resume states and replays them over new sequences.

    This costs one comparison a token, and one entry for each request that is due.
    """

    def __init__(self, outputs: OutputProcessor, model: DecoderModel, *, interval_tokens: int | None) -> None:
        self._outputs = outputs
        self._model = model
        self._are_on = interval_tokens is not None
        self._interval_tokens = sys.maxsize if interval_tokens is None else interval_tokens  # off: never due
        self._due: dict[int, None] = {}  # arrivals of groups in the order they came due

    def note_token(self, state: RequestState) -> None:
        """Count a token that a sequence got."""
        if len(state.token_ids) - state.num_prompt_tokens - state.num_saved_tokens >= self._interval_tokens:
            self._due[state.arrival] = None

    def forget(self, group: RequestGroup) -> None:
        """Forget a group that ended."""
        self._due.pop(group.arrival, None)

    def take_due(self, groups: GroupTable[RequestGroup]) -> dict[str, ResumeState]:
        """Resume states of the requests that came due since the last call, by request id. groups: all unfinished."""
        due, self._due = self._due, {}
        found: dict[str, ResumeState] = {}
        for group in groups.at(due):
            found |= dict.fromkeys((request.request_id for request in group.requests), self._take(group))
        return found

    def take_now(self, group: RequestGroup) -> ResumeState | None:
        """The resume state of a request, due or not; None if it has generated nothing, or resume states are off."""
        has_output = any(state.num_output_tokens for state in group.states)
        return self._take(group) if self._are_on and has_output else None

    def copy_progress(self, group: RequestGroup, states: Sequence[RequestState]) -> None:
        """Replay what a group has generated over new sequences of an equal request.

        The new ones have no grammar, so an end that came from the grammar is copied.
        """
        for state, source, sequence in zip(states, group.answering, _sequences(group), strict=True):
            self._replay(state, sequence)
            if source.is_finished:
                was_finished = state.is_finished
                state.finish_reason, state.stop_reason = source.finish_reason, source.stop_reason
                if not was_finished:
                    self._outputs.flush(state)

    def _take(self, group: RequestGroup) -> ResumeState:
        """A resume state of all sequences, after which none of them is due for a while."""
        for state in group.states:
            state.num_saved_tokens = state.num_output_tokens
        return ResumeState(self._identity(group.request), group.base_seed, _sequences(group))

    def usable(self, request: Request) -> ResumeState | None:
        """The resume state that a request brings; None if it has none, or one of another request (with a warning)."""
        resume_state = request.resume
        if resume_state is None:
            return None
        fault = self._fault(request, resume_state)
        if fault is None:
            return resume_state
        _warn_dropped(request, fault)
        return None

    def restore(self, resume_state: ResumeState, states: Sequence[RequestState]) -> bool:
        """Replay a resume state over the new sequences of its request.

        False if its tokens cannot have come from this request: `states` cannot be used then.
        """
        for state, sequence in zip(states, resume_state.sequences, strict=True):
            if not self._replay(state, sequence):
                _warn_dropped(state.request, f"sequence {state.index} goes on after its end")
                return self._forget_replayed(states)
        if states[0].scores_prompt and all(state.is_finished for state in states):
            _warn_dropped(states[0].request, "nothing is left to run, and its prompt has no log-probabilities yet")
            return self._forget_replayed(states)
        return True

    def _forget_replayed(self, states: Sequence[RequestState]) -> bool:
        for state in states:
            self._outputs.forget(state)
        return False

    def _replay(self, state: RequestState, sequence: SequenceResumeState) -> bool:
        for position, token_id in enumerate(sequence.token_ids):
            if state.is_finished:
                return False
            logprobs = None if sequence.logprobs is None else sequence.logprobs[position]
            self._outputs.append(state, SampledToken(token_id, logprobs))
        state.num_saved_tokens = state.num_output_tokens
        return True

    def _fault(self, request: Request, resume_state: ResumeState) -> str | None:
        params, sequences = request.params, resume_state.sequences
        if resume_state.identity != self._identity(request):
            return "it is of another model, prompt or parameters"
        if len(sequences) != params.n:
            return f"it has {len(sequences)} sequences, the request {params.n}"
        if params.seed is not None and resume_state.base_seed != params.seed:
            return "its seed is not the request's"
        vocab_size = self._model.config.vocab_size
        for sequence in sequences:
            if not all(0 <= token_id < vocab_size for token_id in sequence.token_ids):
                return f"a token id is outside the vocabulary of {vocab_size}"
            if not _has_its_logprobs(sequence, is_asked=params.logprobs is not None):
                return "its logprobs do not go with its tokens"
        return None

    def _identity(self, request: Request) -> str:
        digest = hashlib.blake2b(self._fingerprint.encode(), digest_size=16)
        digest.update(array("q", request.prompt_token_ids).tobytes())
        digest.update(repr(request.params).encode("utf-8", "surrogatepass"))
        digest.update(request.continuation_bytes)
        return digest.hexdigest()

    @cached_property
    def _fingerprint(self) -> str:
        return model_fingerprint(self._model)


def _sequences(group: RequestGroup) -> tuple[SequenceResumeState, ...]:
    has_logprobs = group.request.params.logprobs is not None
    return tuple(
        SequenceResumeState(tuple(state.output_token_ids), tuple(state.logprobs) if has_logprobs else None)
        for state in group.answering
    )


def _has_its_logprobs(sequence: SequenceResumeState, *, is_asked: bool) -> bool:
    if sequence.logprobs is None:
        return not is_asked
    chosen = tuple(logprobs.token_id for logprobs in sequence.logprobs)
    return is_asked and chosen == sequence.token_ids


def _warn_dropped(request: Request, fault: str) -> None:
    fields = {"request_id": request.request_id}
    logger.warning(
        "the resume state of request %s is dropped, it starts over: %s", request.request_id, fault, extra=fields
    )


def model_fingerprint(model: DecoderModel) -> str:
    """Digest of a model's configuration, device, dtype, matrix products, of whether its KV cache is rounded, and of the
    first elements of its weights.

    The products, because int8 weights and the deterministic mode give other logits, and each has products of its own.
    """
    products = model.ops.linear.__module__
    # As before there was a choice without it: states of earlier versions stay good.
    cache = ("float8 cache",) if model.has_float8_cache else ()
    computed = (model.config, model.device.type, products, str(model.dtype), model.weights_digest, *cache)
    return hashlib.blake2b(repr(computed).encode(), digest_size=16).hexdigest()
