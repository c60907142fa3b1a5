"""What a caller asks the engine for, and what it gets back.

Requests for tokens and for embeddings, the one output that each of them ends in, and how far an unfinished one had
come. Values only, and torch-free.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import overload

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
    """What one of a request's `n` sequences had generated. Whether it had ended follows from its tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None  # one a token; None unless the request asked for them


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What an unfinished request had generated: enough to go on with it, in any engine with the same model.

    Text, penalties and stop strings are not in it: they follow from the tokens, which are replayed.
    """

    identity: str  # digest of model, prompt and parameters: it is worth nothing for any other request
    base_seed: int  # of the draws; also of a request that brought none, so that it goes on with the same draws
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
    tenant: str = ""  # whose it is: KV and results are shared within a tenant alone, and tenants get equal shares
    resume: ResumeState | None = None  # go on from here; one that is not of this request is dropped

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)


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


AnyRequest = Request | EmbeddingRequest


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
    """One entry a prompt token: its log-probability behind the tokens before it. None for the first, which nothing
    predicts.

    Filled from front to back, once. Kept as numbers of 4 bytes and spelled out entry by entry as it is read: 20
    alternatives as objects would take 2.5 kB a token, and prompts have tens of thousands.
    """

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        """`num_top`: alternatives a position."""
        self.token_ids = token_ids  # the prompt's
        self.num_top = num_top
        self._logprobs = array("f")
        self._top_ids = array("i")  # num_top a position, fewer where the vocabulary has fewer
        self._top_logprobs = array("f")

    @property
    def num_scored(self) -> int:
        """Leading positions whose next token has its entry: what the model said at these is not needed again."""
        return len(self._logprobs)

    @property
    def is_complete(self) -> bool:
        """Whether every token but the first has its entry."""
        return self.num_scored >= len(self.token_ids) - 1

    def add(self, logprobs: Iterable[float], top_ids: Iterable[int], top_logprobs: Iterable[float]) -> None:
        """Append the next entries; the alternatives of all of them one behind the other, each position's best first."""
        self._logprobs.extend(logprobs)
        self._top_ids.extend(top_ids)
        self._top_logprobs.extend(top_logprobs)

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
        if position == 0:
            return None
        count = len(self._top_ids) // max(1, self.num_scored)
        those = slice((position - 1) * count, position * count)
        top = tuple(zip(self._top_ids[those], self._top_logprobs[those], strict=True))
        return TokenLogprobs(self.token_ids[position], self._logprobs[position - 1], top)


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """When a request got how far, in seconds of this process's time.monotonic(). Of several sequences, the first."""

    arrived_s: float  # at the engine
    scheduled_s: float | None  # for the first time; None: never
    first_token_s: float | None  # None: none was generated here, as for an embedding
    finished_s: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The one end of one request: its completions, or its embeddings, or the error that stopped it."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV came from the prefix cache; all where an equal request was run
    completions: tuple[Completion, ...]  # in index order; none of an embedding request
    error: EngineError | None = None
    num_resumed_tokens: int = 0  # of the completions: taken over from a resume state, not generated here
    embeddings: tuple[array[float], ...] = ()  # float32, of length 1, in the order of the inputs
    prompt_logprobs: PromptLogprobs | None = None  # one a prompt token; None unless asked for, or where it was aborted
    timings: RequestTimings | None = None  # None where nothing was run for it: refused, or an equal request was run

    @property
    def was_aborted(self) -> bool:
        """Whether somebody ended it early. Of an embedding request nothing is left then: it has no half vectors."""
        if self.error is not None or self.embeddings:
            return False
        return not self.completions or any(c.finish_reason is FinishReason.CANCELLED for c in self.completions)
