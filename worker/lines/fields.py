"""Defines what request bodies have in common: their base models, the fields without effect, the range of each number.

The ranges are stated here too, since a producer checks its lines without the engine: `engine.sampling_params` has the
same ranges in the same words, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.strict_json import shorten

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_TOKENS = 2**31 - 1  # no context is that long: a greater number was mistyped, and may have thousands of digits
MAX_TOKEN_ID = 2**31 - 1  # no vocabulary is that large
# Within these, scaling logits in float32 neither overflows nor vanishes.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e4
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-2, 1e2

TOKEN_IDS = f"token ids of 0 to {MAX_TOKEN_ID}"


class BodyModel(BaseModel):
    """A frozen object that refuses unknown keys and converts no types ("10" is not a number, true is not 1).

    A known key whose value is null counts as absent, as the OpenAI API has it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nullable: ClassVar[frozenset[str]] = frozenset()  # keys whose null is a value of its own

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        return cls.less_nulls(value)

    @classmethod
    def less_nulls(cls, value: object) -> object:
        """`value`, if it is an object, less the optional keys that are null."""
        if not isinstance(value, dict) or None not in value.values():
            return value
        optional = cls.model_fields.keys() - cls.nullable
        return {key: item for key, item in value.items() if item is not None or key not in optional}


class GivenModel(BodyModel):
    """A BodyModel that remembers the object as the line had it.

    In a slot: a private attribute of pydantic's takes 3 us an object, and a conversation has many objects.
    """

    if TYPE_CHECKING:
        _given: Mapping[str, object]
    else:
        __slots__ = ("_given",)

    @model_validator(mode="wrap")
    @classmethod
    def _without_nulls(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Replaces the base's validator: pydantic calls one for each object, not two."""
        model = handler(cls.less_nulls(value))
        object.__setattr__(model, "_given", value)  # the model is frozen
        return model

    def as_given(self) -> dict[str, object]:
        """The object as the line had it, key order included: a template's `tojson` shows that order."""
        return dict(self._given)


class ServiceFields(BodyModel):
    """OpenAI's fields about the request, not about its answer: accepted in the form OpenAI accepts, and of no effect.

    The whole list. Parameters that would change the answer and are not carried out: see ignored.without_neutral.
    """

    user: str | None = None
    safety_identifier: str | None = None
    metadata: Mapping[str, str] | None = None
    store: bool | None = None  # results stay in Redis for redis.result_ttl_s either way
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None  # there is one tier
    # Prefixes are cached for every request, and wherever they are equal.
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    # Text the answer is likely to repeat: OpenAI answers faster, not differently.
    prediction: Mapping[str, object] | None = None


def _within(holds: Callable[[float], bool], accepted: str) -> AfterValidator:
    """A validator that refuses a number for which `holds` is false, with `accepted` as what to write instead."""

    def check(number: float) -> float:
        if not holds(number):
            raise PydanticCustomError("invalid_value", "{accepted}", {"accepted": accepted})
        return number

    return AfterValidator(check)


TEMPERATURE = _within(
    lambda number: number == 0.0 or MIN_TEMPERATURE <= number <= MAX_TEMPERATURE,
    f"0, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
)
TOP_P = _within(lambda number: 0.0 < number <= 1.0, "above 0, at most 1")
# -1 is vLLM's spelling of off.
TOP_K = _within(lambda number: -1 <= number <= MAX_TOP_K, f"a whole number, 0 (off) to {MAX_TOP_K}")
MIN_P = _within(lambda number: 0.0 <= number <= 1.0, "0 to 1")
REPETITION_PENALTY = _within(
    lambda number: MIN_REPETITION_PENALTY <= number <= MAX_REPETITION_PENALTY,
    f"{MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}",
)
COUNT_PENALTY = _within(lambda number: -2.0 <= number <= 2.0, "-2 to 2")
SEED = _within(lambda number: -MAX_SEED - 1 <= number <= MAX_SEED, "a 64-bit whole number")
AT_LEAST_ONE = _within(lambda number: 1 <= number <= MAX_TOKENS, f"a whole number, 1 to {MAX_TOKENS}")
AT_LEAST_NONE = _within(lambda number: 0 <= number <= MAX_TOKENS, f"a whole number, 0 to {MAX_TOKENS}")
# -1 is vLLM's word for the context.
TRUNCATION = _within(
    lambda number: number == -1 or 1 <= number <= MAX_TOKENS, f"-1 (the context), or a whole number, 1 to {MAX_TOKENS}"
)

TOKEN_ID = _within(lambda number: 0 <= number <= MAX_TOKEN_ID, TOKEN_IDS)


def token_ids(values: Sequence[object], *, at: int | None = None) -> tuple[int, ...]:
    """`values`, if all of them are token ids. Raises PydanticCustomError, which shows the value at fault.

    The error names the value's position, or `at`, the position of the list.
    """
    checked: list[int] = []
    for position, value in enumerate(values):
        if type(value) is int and 0 <= value <= MAX_TOKEN_ID:  # true is none
            checked.append(value)
            continue
        context = {"at": position if at is None else at, "value": shorten(value), "accepted": TOKEN_IDS}
        raise PydanticCustomError("invalid_value" if type(value) is int else "invalid_type", "{accepted}", context)
    return tuple(checked)
