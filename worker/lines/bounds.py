"""The range of each number in a body.

Stated here too, since a producer checks its lines without the engine: `engine.sampling_params` has the same ranges in
the same words, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from worker.lines.shorten import shorten

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_TOKENS = 2**31 - 1  # no context is that long: what is above it was mistyped, and may have thousands of digits
MAX_TOKEN_ID = 2**31 - 1  # nor has a vocabulary so many
# Within these, scaling logits in float32 neither overflows nor vanishes.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e4
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-2, 1e2


def _within(holds: Callable[[float], bool], accepted: str) -> AfterValidator:
    """A validator that refuses a number for which `holds` is false, with `accepted` as what to write instead."""

    def check(number: float) -> float:
        if not holds(number):
            raise PydanticCustomError("invalid_value", "{accepted}", {"accepted": accepted})
        return number

    return AfterValidator(check)


TEMPERATURE = _within(
    lambda number: number == 0.0 or MIN_TEMPERATURE <= number <= MAX_TEMPERATURE,
    f"0, or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
)
TOP_P = _within(lambda number: 0.0 < number <= 1.0, "above 0, at most 1")
# -1 is vLLM's spelling of off.
TOP_K = _within(lambda number: -1 <= number <= MAX_TOP_K, f"a whole number, 0 (off) to {MAX_TOP_K}")
MIN_P = _within(lambda number: 0.0 <= number <= 1.0, "0 to 1")
REPETITION_PENALTY = _within(
    lambda number: MIN_REPETITION_PENALTY <= number <= MAX_REPETITION_PENALTY,
    f"{MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}",
)
COUNT_PENALTY = _within(lambda number: -2.0 <= number <= 2.0, "-2 to 2")
SEED = _within(lambda number: -MAX_SEED - 1 <= number <= MAX_SEED, "a 64-bit whole number")
AT_LEAST_ONE = _within(lambda number: 1 <= number <= MAX_TOKENS, f"a whole number, 1 to {MAX_TOKENS}")
AT_LEAST_NONE = _within(lambda number: 0 <= number <= MAX_TOKENS, f"a whole number, 0 to {MAX_TOKENS}")
TOKEN_IDS = f"token ids of 0 to {MAX_TOKEN_ID}"
TOKEN_ID = _within(lambda number: 0 <= number <= MAX_TOKEN_ID, TOKEN_IDS)


def token_ids(values: Sequence[object], *, at: int | None = None, accepted: str = TOKEN_IDS) -> tuple[int, ...]:
    """`values`, each of them a token id; otherwise PydanticCustomError, which shows the value at fault.

    It names the value's position, or `at`, that of the list. `accepted`: what may stand in a value's place that is no
    whole number at all.
    """
    checked: list[int] = []
    for position, value in enumerate(values):
        if type(value) is int and 0 <= value <= MAX_TOKEN_ID:  # true is none
            checked.append(value)
            continue
        is_number = type(value) is int
        context = {"at": position if at is None else at, "value": shorten(value)}
        context["accepted"] = TOKEN_IDS if is_number else accepted
        raise PydanticCustomError("invalid_value" if is_number else "invalid_type", "{accepted}", context)
    return tuple(checked)
