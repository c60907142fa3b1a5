"""Checks the bodies of /v1/completions and /v1/embeddings, and the sampling parameters that chat shares."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.fields import (
    AT_LEAST_NONE,
    AT_LEAST_ONE,
    COUNT_PENALTY,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    MIN_P,
    REPETITION_PENALTY,
    SEED,
    TEMPERATURE,
    TOKEN_ID,
    TOP_K,
    TOP_P,
    TRUNCATION,
    ServiceFields,
    token_ids,
)
from worker.lines.grammar import GrammarFields
from worker.lines.strict_json import shorten

DEFAULT_MAX_TOKENS = 16  # OpenAI's

EmbeddingInput = str | tuple[int, ...]  # a text, or token ids

_ONE_PROMPT = "one prompt a line, as a string or a list of token ids"
_SHAPES = "a string, a list of strings, a list of token ids or a list of lists of token ids"


def _stop_tuple(value: object) -> object:
    """`stop` is one string or a list of them; the model always holds a tuple."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    raise PydanticCustomError("invalid_type", "a string or a list of strings")


def _bias_by_token(value: object) -> dict[int, float]:
    """`logit_bias` maps decimal token ids (JSON has string keys only) to -100 .. 100."""
    if not isinstance(value, dict):
        raise PydanticCustomError("invalid_type", "an object of token ids and numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        at = {"at": key, "value": shorten(bias)}
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise PydanticCustomError("invalid_value", "decimal token ids as keys", at)
        if int(key) > MAX_TOKEN_ID:
            raise PydanticCustomError("invalid_value", f"token ids of 0 to {MAX_TOKEN_ID} as keys", at)
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise PydanticCustomError("invalid_type", "a number from -100 to 100", at)
        if not -100 <= bias <= 100:
            raise PydanticCustomError("invalid_value", "a number from -100 to 100", at)
        if int(key) in biases:  # "7" and "07"
            raise PydanticCustomError("invalid_value", "each token id once", at)
        biases[int(key)] = float(bias)
    return biases


def _allowed_ids(value: object) -> tuple[int, ...]:
    """`allowed_token_ids` is a list; an empty one would leave nothing to generate."""
    if not isinstance(value, list) or not value:
        kind = "invalid_value" if isinstance(value, list) else "invalid_type"
        raise PydanticCustomError(kind, "a list of at least one token id")
    return token_ids(value)


class SamplingBody(GrammarFields):
    """How tokens are chosen and what comes back, plus the service fields that change neither."""

    model: Annotated[str, Field(min_length=1)] | None = None
    max_tokens: Annotated[int, AT_LEAST_ONE] | None = None
    min_tokens: Annotated[int, AT_LEAST_NONE] = 0
    temperature: Annotated[float, TEMPERATURE] = 1.0
    top_p: Annotated[float, TOP_P] = 1.0
    top_k: Annotated[int, TOP_K] = 0  # 0 and -1: off
    min_p: Annotated[float, MIN_P] = 0.0
    seed: Annotated[int, SEED] | None = None
    n: Annotated[int, AT_LEAST_ONE] = 1
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_stop_tuple)] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, TOKEN_ID], ...], Strict(False)] = ()
    allowed_token_ids: Annotated[tuple[int, ...], BeforeValidator(_allowed_ids)] = ()
    ignore_eos: bool = False
    repetition_penalty: Annotated[float, REPETITION_PENALTY] = 1.0
    presence_penalty: Annotated[float, COUNT_PENALTY] = 0.0
    frequency_penalty: Annotated[float, COUNT_PENALTY] = 0.0
    logit_bias: Annotated[Mapping[int, float], BeforeValidator(_bias_by_token)] = Field(default_factory=dict)
    return_token_ids: bool = False


def _prompt(value: object) -> str | tuple[int, ...]:
    at = None
    if isinstance(value, list) and value and isinstance(value[0], str | list):  # OpenAI's list of prompts
        if len(value) > 1:
            raise PydanticCustomError("invalid_type", _ONE_PROMPT)
        value, at = value[0], 0
    if not isinstance(value, str | list):
        raise PydanticCustomError("invalid_type", "a string or a list of token ids")
    if not value:
        raise PydanticCustomError("empty_prompt", "a prompt that is not empty")
    return value if isinstance(value, str) else token_ids(value, at=at)  # of a list of lists it names the list


class CompletionBody(SamplingBody):
    """A prompt, as text or as token ids, and how to continue it."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]
    max_tokens: Annotated[int, AT_LEAST_NONE] | None = None  # 0 with echo: the prompt is scored and not continued
    logprobs: Annotated[int, AT_LEAST_NONE] | None = None  # alternatives a position; 0: the chosen token's only
    echo: bool = False  # the prompt comes back before its continuation, with log-probabilities where asked for

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            accepted = f"a whole number, 1 to {MAX_TOKENS}; 0 only with echo true"
            raise PydanticCustomError("invalid_value", "{accepted}", {"accepted": accepted, "at": "max_tokens"})
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives a position, None for no logprobs at all."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives a position of the prompt, None for no logprobs of it."""
        return self.logprobs if self.echo else None

    @property
    def max_output_tokens(self) -> int | None:
        """Tokens the line asks for; None: it does not say, so 16, or what the context leaves if that is less."""
        return self.max_tokens


def _inputs(value: object) -> tuple[EmbeddingInput, ...]:
    """OpenAI's four shapes as one: a tuple of inputs."""
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return (_input(value, (str, list), None),)
    kind = str if isinstance(value[0], str) else list
    return tuple(_input(item, (kind,), position) for position, item in enumerate(value))


def _input(value: object, kinds: tuple[type, ...], position: int | None) -> EmbeddingInput:
    at = {} if position is None else {"at": position}
    if not isinstance(value, str | list) or not isinstance(value, kinds):
        raise PydanticCustomError("invalid_type", _SHAPES if list in kinds else "a string, as the first input", at)
    if not value:
        raise PydanticCustomError("empty_prompt", "an input that is not empty", at)
    return value if isinstance(value, str) else token_ids(value, at=position)  # of several lists it names the list


class PooledBody(ServiceFields):
    """Texts, or token ids, each of which becomes a vector, a class or a part of a score.

    A text gets the special tokens that the model's tokenizer puts around it; token ids are taken as they are.
    """

    model: Annotated[str, Field(min_length=1)] | None = None
    truncate_prompt_tokens: Annotated[int, TRUNCATION] | None = None  # of each text or pair; -1: to the model's context

    @abstractmethod
    def param_of(self, index: int) -> str:
        """What error messages call an input."""


class InputBody(PooledBody):
    """OpenAI's input: one or several, as texts or as token ids."""

    input: Annotated[tuple[EmbeddingInput, ...], BeforeValidator(_inputs)]

    def param_of(self, index: int) -> str:
        """See PooledBody."""
        return "input" if len(self.input) == 1 else f"input[{index}]"


class EmbeddingBody(InputBody):
    """Inputs, each of which becomes one vector of length 1."""

    encoding_format: Literal["float", "base64"] = "float"  # base64: of the float32 numbers, little-endian
    dimensions: Annotated[int, AT_LEAST_ONE] | None = None  # the engine refuses it for models not made for it
