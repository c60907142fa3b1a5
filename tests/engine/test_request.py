"""What a request may ask for, and the timings in its output."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.request import EmbeddingRequest, RequestOutput, RequestTimings
from engine.sampling_params import SamplingParams
from tests.support.engines import greedy_request, load_engine, run_all

REQUESTS = (greedy_request("a", range(20), 4), replace(greedy_request("b", range(40, 60), 4), priority=1))


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


@pytest.fixture(scope="module")
def engine(moe_checkpoint: Path) -> Engine:
    """An engine that runs one sequence at a time."""
    return load_engine(moe_checkpoint, {"engine.max_num_seqs": "1", "engine.async_scheduling": "false"})


def timings_of(output: RequestOutput) -> RequestTimings:
    assert output.timings is not None
    return output.timings


def instants(timings: RequestTimings) -> list[float]:
    assert timings.scheduled_s is not None
    assert timings.first_token_s is not None
    return [timings.arrived_s, timings.scheduled_s, timings.first_token_s, timings.finished_s]


def test_a_requests_times_are_in_order_from_arrival_to_finish(engine: Engine) -> None:
    before_s = time.monotonic()
    outputs = run_all(engine, REQUESTS)
    after_s = time.monotonic()

    first, second = (instants(timings_of(outputs[name])) for name in "ab")
    for request in (first, second):
        assert request == sorted(request)
        assert before_s < request[0] < request[-1] < after_s
    assert first[-1] <= second[1]  # it had waited
    assert second[0] < first[1]


def test_a_first_token_comes_once_and_before_the_others(engine: Engine) -> None:
    engine.add_request(greedy_request("a", range(20), 4))
    engine.step()
    one_token_s = time.monotonic()
    [output] = [output for _ in range(3) for output in engine.step()]

    _, _, first_token_s, finished_s = instants(timings_of(output))
    assert first_token_s < one_token_s < finished_s


def test_an_embedding_has_no_first_token(engine: Engine) -> None:
    timings = timings_of(run_all(engine, [EmbeddingRequest("a", [range(20), range(5, 30)])])["a"])

    assert timings.first_token_s is None
    assert timings.scheduled_s is not None
    assert timings.arrived_s < timings.scheduled_s < timings.finished_s


def test_an_equal_request_has_none_since_nothing_is_run_for_it(engine: Engine) -> None:
    outputs = run_all(engine, [greedy_request("a", range(20), 4), greedy_request("b", range(20), 4)])

    assert outputs["a"].timings is not None
    assert outputs["b"].timings is None


def test_who_is_aborted_while_waiting_was_never_scheduled(engine: Engine) -> None:
    for request in REQUESTS:
        engine.add_request(request)
    engine.step()
    engine.abort("b")
    outputs = run_all(engine, [])

    timings = timings_of(outputs["b"])
    assert (timings.scheduled_s, timings.first_token_s) == (None, None)
    assert timings.arrived_s < timings.finished_s
