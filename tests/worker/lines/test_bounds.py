"""A number out of range is refused at parse, in the words of the engine, which has the same ranges."""

from __future__ import annotations

import math

import pytest

from engine import sampling_params
from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams
from tests.support.request_lines import chat_line, completion_line, error_of, parse, raw_line
from worker.lines import fields as bounds

# Parameter -> the outermost values inside its range, and the innermost ones outside.
EDGES: dict[str, tuple[list[float], list[float]]] = {
    "temperature": ([0, 1e-5, 1e4], [-0.1, 5e-324, 9.9e-6, math.nextafter(1e4, math.inf), 1e308]),
    "top_p": ([5e-324, 1], [0, -1, 1.0000001]),
    "top_k": ([0, 2**31 - 1], [-2, 2**31, 10**30]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "repetition_penalty": ([0.01, 100], [0, 5e-324, 0.0099, 100.1, 1e300]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "seed": ([-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63, 10**4000]),
}
INSIDE = [(name, value) for name, (inside, _) in EDGES.items() for value in inside]
OUTSIDE = [(name, value) for name, (_, outside) in EDGES.items() for value in outside]


def ids(value: object) -> str:
    return str(value)[:30]


@pytest.mark.parametrize(("name", "value"), INSIDE, ids=ids)
def test_what_the_parser_accepts_the_engine_accepts(name: str, value: float) -> None:
    assert getattr(parse(completion_line(**{name: value})).body, name) == value
    SamplingParams(**{name: value})  # type: ignore[arg-type]  # one parameter of many types


@pytest.mark.parametrize(("name", "value"), OUTSIDE, ids=ids)
def test_what_the_parser_refuses_the_engine_refuses_in_the_same_words(name: str, value: float) -> None:
    error = error_of(completion_line(**{name: value}))

    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**{name: value})  # type: ignore[arg-type]  # one parameter of many types

    assert (error.code, error.param) == ("invalid_value", name)
    assert error.message.endswith(f"accepted: {raised.value.accepted}")
    assert len(error.message) < 200


@pytest.mark.parametrize(
    "name",
    ["MAX_SEED", "MAX_TOP_K", "MIN_TEMPERATURE", "MAX_TEMPERATURE", "MIN_REPETITION_PENALTY", "MAX_REPETITION_PENALTY"],
)
def test_parser_and_engine_have_the_same_constants(name: str) -> None:
    assert getattr(bounds, name) == getattr(sampling_params, name)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (completion_line(max_tokens=10**4000), "max_tokens"),
        (completion_line(min_tokens=10**30), "min_tokens"),
        (completion_line(n=10**30), "n"),
        (completion_line(logprobs=10**4000), "logprobs"),
        (completion_line(stop_token_ids=[1, 10**20]), "stop_token_ids[1]"),
        (completion_line(logit_bias={"9999999999": 1}), "logit_bias.9999999999"),
        (completion_line(temperature=10**400), "temperature"),
        (raw_line({"prompt": [1, 10**4200]}), "prompt[1]"),
        (chat_line(max_completion_tokens=10**30), "max_completion_tokens"),
        (chat_line(logprobs=True, top_logprobs=10**30), "top_logprobs"),
    ],
    ids=ids,
)
def test_a_number_of_any_length_is_refused_in_a_short_message(raw: bytes, param: str) -> None:
    error = error_of(raw)

    assert error.param == param
    assert len(error.message) < 200
