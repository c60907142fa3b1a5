"""What a caller asks the engine for, and what it gets back.

Requests for tokens, for embeddings and for scores of classes, the one output that each ends in, and resume states.
Values only, torch-free.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import overload

from engine.checkpoint.classifier_config import ClassActivation
from engine.errors import EngineError
from engine.sampling_params import SamplingParams

RESERVED_PREFIX = "__millrace"  # of the engine's own ids


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the model's raw logits: before penalties, bias, temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first, as many as the request asked for


@dataclass(frozen=True, slots=True)
class SequenceResumeState:
    """What one of a request's `n` sequences had generated. The tokens tell whether it had ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None  # one a token; None unless the request asked for them


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What an unfinished request had generated: enough to go on with it, in any engine with the same model.

    Text, penalties and stop strings are not in it: they follow from the tokens, which are replayed.
    """

    identity: str  # digest of model, prompt and parameters: no use for any other request
    base_seed: int  # of the draws; kept for requests without a seed too, so that they go on with the same draws
    sequences: tuple[SequenceResumeState, ...]  # in index order, as many as the request's n

    @property
    def num_tokens(self) -> int:
        """Tokens generated, of all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. Immutable: what happens to it is in a `RequestState`."""

    request_id: str  # unique among the unfinished requests of an engine; must not start with RESERVED_PREFIX
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0  # lower runs first
    tenant: str = ""  # KV and results are shared only within a tenant, and tenants get equal shares
    resume: ResumeState | None = None  # go on from here; dropped if it is not of this request
    continuations: Sequence[Sequence[int]] = ()  # token ids, none empty, that are scored behind the prompt
    goes_on: bool = False  # its text continues the prompt's, and may begin with a space; else it is a text of its own

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def continuation_bytes(self) -> bytes:
        """What tells requests of other continuations apart, for digests; empty without any."""
        each = (array("q", [len(token_ids), *token_ids]).tobytes() for token_ids in self.continuations)
        return b"".join(each)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Some inputs, each of which becomes one vector. Immutable: what happens to them is in `EmbeddingState`s."""

    request_id: str  # unique among the unfinished requests of an engine, of either kind
    inputs: Sequence[Sequence[int]]  # token ids; at least one input, none of them empty
    dimensions: int | None = None  # leading elements to keep of each vector; None: all
    priority: int = 0  # lower runs first
    tenant: str = ""  # as in Request

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all inputs."""
        return sum(map(len, self.inputs))


@dataclass(frozen=True, slots=True)
class ClassificationRequest:
    """Some inputs, for each of which a model's head scores its classes. A text, or a pair of texts end to end."""

    request_id: str  # unique among the unfinished requests of an engine, of any kind
    inputs: Sequence[Sequence[int]]  # token ids; at least one input, none of them empty
    activation: ClassActivation  # what scores are made of logits by
    # For each input, where the tokens of a pair's second text begin, at most its length; none: there are no pairs.
    # Decoders, which do not tell segments apart, have no use for them.
    second_starts: Sequence[int] = ()
    priority: int = 0  # lower runs first
    tenant: str = ""  # as in Request

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all inputs."""
        return sum(map(len, self.inputs))


PooledRequest = EmbeddingRequest | ClassificationRequest  # each input gives one vector, of what is pooled of it
AnyRequest = Request | PooledRequest


class FinishReason(Enum):
    """Why a completion ended. Values are the OpenAI API's where it has one."""

    STOP = "stop"  # an end-of-sequence id, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Completion:
    """One of a request's `n` generated sequences, finished."""

    index: int  # 0 .. n - 1
    text: str  # ends before a stop string
    token_ids: tuple[int, ...]  # everything generated, the end-of-sequence or stop token included
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token id that ended it; None for end of sequence
    logprobs: tuple[TokenLogprobs, ...] | None  # one a token of token_ids; None unless asked for


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """One entry a prompt token: its log-probability given the tokens before it. None for the first, which nothing
    predicts, and for as many as are given.

    Filled once, from front to back. Kept as numbers of 4 bytes, from which entries are made when they are read: 20
    alternatives as objects would take 2.5 kB a token, and prompts have tens of thousands.
    """

    def __init__(self, token_ids: Sequence[int], num_top: int, *, num_given: int = 1) -> None:
        """num_top: alternatives a position; num_given: leading tokens that get no entry, at least the first."""
        self.token_ids = token_ids  # the prompt's
        self.num_top = num_top
        self._num_given = num_given
        self._logprobs = array("f")
        self._top_ids = array("i")  # num_top a position, fewer where the vocabulary has fewer
        self._top_logprobs = array("f")

    @property
    def num_scored(self) -> int:
        """Leading positions whose next token has its entry: their logits are not needed again."""
        return self._num_given - 1 + len(self._logprobs)

    @property
    def is_complete(self) -> bool:
        """Whether every token has its entry but those that get none."""
        return self.num_scored >= len(self.token_ids) - 1

    def add(self, logprobs: Iterable[float], top_ids: Iterable[int], top_logprobs: Iterable[float]) -> None:
        """Append the next entries; their alternatives are concatenated, each position's best first."""
        self._logprobs.extend(logprobs)
        self._top_ids.extend(top_ids)
        self._top_logprobs.extend(top_logprobs)

    def total(self) -> float:
        """The sum of the log-probabilities so far."""
        return sum(self._logprobs)

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self._entry(position) for position in range(*index.indices(len(self)))]
        return self._entry(range(len(self))[index])

    def _entry(self, position: int) -> TokenLogprobs | None:
        place = position - self._num_given
        if place < 0:
            return None
        count = len(self._top_ids) // max(1, len(self._logprobs))
        those = slice(place * count, (place + 1) * count)
        top = tuple(zip(self._top_ids[those], self._top_logprobs[those], strict=True))
        return TokenLogprobs(self.token_ids[position], self._logprobs[place], top)


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """When a request got how far, in seconds of time.monotonic() in this process. The first of several sequences."""

    arrived_s: float  # at the engine
    scheduled_s: float | None  # for the first time; None: never
    first_token_s: float | None  # None: none was generated here, as for embeddings
    finished_s: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The one end of one request: completions, or embeddings, or scores of classes, or the error that stopped it."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV came from the prefix cache; all if an equal request was run
    completions: tuple[Completion, ...]  # in index order; none of a request that generates nothing
    error: EngineError | None = None
    num_resumed_tokens: int = 0  # of the completions: from a resume state, not generated here
    embeddings: tuple[array[float], ...] = ()  # float32, of length 1, in the order of the inputs
    class_scores: tuple[array[float], ...] = ()  # float32, one a class of the model, in the order of the inputs
    prompt_logprobs: PromptLogprobs | None = None  # one a prompt token; None unless asked for, or if aborted
    # Of each of its continuations the sum over the tokens, natural, raw logits; None: ended before all had one.
    continuation_logprobs: tuple[float, ...] | None = ()
    timings: RequestTimings | None = None  # None if nothing was run for it: refused, or an equal request was run

    @property
    def was_aborted(self) -> bool:
        """Whether it was ended early. A request that generates nothing has no vectors then."""
        if self.error is not None or self.embeddings or self.class_scores:
            return False
        is_cut = any(completion.finish_reason is FinishReason.CANCELLED for completion in self.completions)
        return not self.completions or is_cut or self.continuation_logprobs is None
