"""The parameters that both endpoints share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict
from pydantic_core import PydanticCustomError

from worker.lines.body_model import BodyModel
from worker.lines.shorten import shorten

MAX_SEED = 2**63 - 1


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
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise PydanticCustomError("invalid_type", "a number from -100 to 100", at)
        if not -100 <= bias <= 100:
            raise PydanticCustomError("invalid_value", "a number from -100 to 100", at)
        if int(key) in biases:  # "7" and "07"
            raise PydanticCustomError("invalid_value", "each token id once", at)
        biases[int(key)] = float(bias)
    return biases


class SamplingBody(BodyModel):
    """How tokens are chosen and what comes back, plus the service fields that change neither.

    Service fields, accepted as OpenAI accepts them and of no effect on the answer: user, safety_identifier,
    prompt_cache_key, metadata, store, service_tier.
    """

    model: Annotated[str, Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_stop_tuple)] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False)] = ()
    ignore_eos: bool = False
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[Mapping[int, float], BeforeValidator(_bias_by_token)] = Field(default_factory=dict)
    return_token_ids: bool = False

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Mapping[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
