"""Sampling parameters are checked where they are made."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 1e-6),
        ("temperature", 1e300),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 2**63 - 1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("seed", 2**63),
        ("logit_bias", {3: 101.0}),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("stop", ("a", "")),
        ("n", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]  # a wrong value is the point
    assert caught.value.param == name
    assert caught.value.accepted is not None


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 5; accepted: 0 to max_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_zero_temperature_is_greedy_and_the_default_draws_from_everything() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    plain = SamplingParams()
    assert (plain.is_greedy, plain.truncates, plain.has_penalties) == (False, False, False)
