"""The parameters that both endpoints share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, Strict
from pydantic_core import PydanticCustomError

from worker.lines.bounds import (
    AT_LEAST_NONE,
    AT_LEAST_ONE,
    COUNT_PENALTY,
    MAX_TOKEN_ID,
    MIN_P,
    REPETITION_PENALTY,
    SEED,
    TEMPERATURE,
    TOKEN_ID,
    TOP_K,
    TOP_P,
)
from worker.lines.grammar_fields import GrammarFields
from worker.lines.shorten import shorten


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
    ignore_eos: bool = False
    repetition_penalty: Annotated[float, REPETITION_PENALTY] = 1.0
    presence_penalty: Annotated[float, COUNT_PENALTY] = 0.0
    frequency_penalty: Annotated[float, COUNT_PENALTY] = 0.0
    logit_bias: Annotated[Mapping[int, float], BeforeValidator(_bias_by_token)] = Field(default_factory=dict)
    return_token_ids: bool = False
