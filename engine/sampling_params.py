"""How the tokens of a request are chosen: the parameters and their ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from engine.errors import InvalidRequest
from engine.structured.grammar import Grammar

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
# Within these, scaling logits in float32 neither overflows nor vanishes.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e4
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-2, 1e2

# Made once: with every request it took 2 of 8 us.
_TEMPERATURE_ACCEPTED = f"0, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
_TOP_K_ACCEPTED = f"a whole number, 0 (off) to {MAX_TOP_K}"
_REPETITION_PENALTY_ACCEPTED = f"{MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen; the order of operations is transformers'.

    logit_bias, then the repetition, frequency and presence penalties, then the ban of ends by min_tokens, of all but
    allowed_token_ids, and the grammar, then temperature, top_k, top_p, min_p, then one draw. Raises InvalidRequest
    naming the parameter.
    """

    max_tokens: int | None = None  # None: what the context leaves; 0: nothing is generated
    min_tokens: int = 0  # end-of-sequence and stop token ids are banned until then
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int | None = None  # None: drawn from the engine's entropy
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # alternatives a position; None: off, 0: the chosen token's only
    prompt_logprobs: int | None = None  # the same for the prompt, all of which is computed then
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # nothing else is generated, no end either unless it is among them; (): all
    ignore_eos: bool = False
    n: int = 1
    # What the output must follow: a token that does not fit gets no probability. The sequence may end only where the
    # grammar is satisfied, at an end-of-sequence or stop token id, or by itself where nothing can follow; but a stop
    # string cuts the text wherever it appears.
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, holds, accepted in self._checks():
            if not holds:
                value = getattr(self, name)
                message = f"{name} is {value!r}; accepted: {accepted}"
                raise InvalidRequest(message, param=name, value=value, accepted=accepted)
        for token_id, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias of token {token_id} is {bias}; accepted: -100 to 100",
                    param="logit_bias", value=bias, accepted="-100 to 100",
                )  # fmt: skip

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        """Parameter, whether it is in its range, and what is accepted. Of a call for each, requests took 4 us more."""
        yield "max_tokens", self.max_tokens is None or self.max_tokens >= 0, "a whole number, at least 0"
        limit = math.inf if self.max_tokens is None else self.max_tokens
        yield "min_tokens", 0 <= self.min_tokens <= limit, "0 to max_tokens"
        is_drawn = MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE
        yield "temperature", self.temperature == 0.0 or is_drawn, _TEMPERATURE_ACCEPTED
        yield "top_k", 0 <= self.top_k <= MAX_TOP_K, _TOP_K_ACCEPTED
        yield "top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"
        yield "min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"
        is_usable = MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY
        yield "repetition_penalty", is_usable, _REPETITION_PENALTY_ACCEPTED
        yield "presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2"
        yield "frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2"
        yield "seed", self.seed is None or -MAX_SEED - 1 <= self.seed <= MAX_SEED, "a 64-bit whole number"
        yield "logprobs", self.logprobs is None or self.logprobs >= 0, "a whole number, at least 0"
        yield "prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= 0, "a whole number, at least 0"
        yield "stop", not self.stop or all(self.stop), "strings that are not empty"
        yield "n", self.n >= 1, "a whole number, at least 1"
        if self.grammar is not None:  # only the grammar decides where the output may end
            yield "min_tokens", self.min_tokens == 0, "0 beside a grammar"
            yield "ignore_eos", not self.ignore_eos, "false beside a grammar"
            yield (
                "allowed_token_ids",
                not self.allowed_token_ids,
                "none beside a grammar",
            )  # they may have no token in common
        elif self.allowed_token_ids:  # which may all be ends
            yield "min_tokens", self.min_tokens == 0, "0 beside allowed_token_ids"

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken, with no draw."""
        return self.temperature == 0.0

    @property
    def takes_best(self) -> bool:
        """Whether the best of the raw logits is taken at each position, and nothing else is asked for of them."""
        is_edited = self.logit_bias or self.has_penalties or self.min_tokens or self.allowed_token_ids
        is_raw = not is_edited and self.grammar is None
        return self.is_greedy and is_raw and self.logprobs is None

    @property
    def has_penalties(self) -> bool:
        """Whether counts of earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p drop tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
