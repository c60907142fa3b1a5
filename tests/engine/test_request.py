"""What a request may ask for, the timings in its output, and the groups that equal requests are in."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import EngineUnavailable, GrammarFailed, InvalidRequest, NonFiniteLogits
from engine.kv_cache.block_manager import BlockManager
from engine.request import EmbeddingRequest, FinishReason, Request, RequestOutput, RequestTimings
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import RequestState
from engine.unfinished import GroupTable, SequenceGroup
from tests.support.engines import greedy_request, load_engine, make_request, make_state, run_all

REQUESTS = (greedy_request("a", range(20), 4), replace(greedy_request("b", range(40, 60), 4), priority=1))
Group = SequenceGroup[Request, RequestState]

BLOCKS = BlockManager(4, 4, prefix_caching=False)


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


def _group(num_sequences: int, num_requests: int = 1, priority: int = 0) -> Group:
    blocks = BlockManager(4, 4, prefix_caching=False)
    requests = [make_request(str(number), [1], priority=priority) for number in range(num_requests)]
    return Group(requests, tuple(make_state(requests[0], blocks) for _ in range(num_sequences)), None)


def test_a_group_is_promoted_though_its_first_sequence_has_ended() -> None:
    group = _group(3, priority=5)
    group.states[0].finish_reason = FinishReason.STOP
    for state in group.unfinished:
        state.priority = 1
    assert group.priority == 1
    for state in group.unfinished:
        state.finish_reason = FinishReason.STOP
    assert group.priority == 1


def test_it_is_complete_when_all_have_ended_in_whatever_order() -> None:
    group = _group(4)
    for index in (2, 0, 3, 1):
        assert not group.is_complete
        assert len(group.unfinished) == sum(not state.is_finished for state in group.states)
        group.states[index].finish_reason = FinishReason.STOP
    assert group.is_complete
    assert group.unfinished == ()


@pytest.mark.parametrize("order", [1, -1], ids=["first to last", "last to first"])
def test_asking_each_sequence_whether_all_have_ended_is_not_quadratic(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, looks = _group(500), []

    def is_finished(state: RequestState) -> bool:
        looks.append(state)
        return state.finish_reason is not None

    monkeypatch.setattr(RequestState, "is_finished", property(is_finished))
    for state in group.states[::order]:
        state.finish_reason = FinishReason.STOP
        _ = group.is_complete
    assert group.is_complete
    assert len(looks) < 3 * 500


@pytest.mark.parametrize(
    ("error", "ended", "others"),
    [
        (None, "012", ""),
        (InvalidRequest("refused"), "012", ""),
        (GrammarFailed("no token fits"), "012", ""),
        (NonFiniteLogits("a bad block"), "0", "12"),
        (EngineUnavailable("no process"), "0", "12"),
    ],
    ids=["no error", "refused", "grammar failed", "not finite", "unavailable"],
)
def test_equals_of_one_that_failed_are_retried_unless_they_would_fail_too(
    error: InvalidRequest | None, ended: str, others: str
) -> None:
    group = _group(1, num_requests=3)
    group.error = error
    assert ["".join(request.request_id for request in part) for part in group.parted()] == [ended, others]


def _keyed_group(name: str, arrival: int, key: bytes | None) -> Group:
    request = make_request(name, [1])
    return Group([request], (make_state(request, BLOCKS, arrival),), key)


def test_a_request_joins_the_group_of_its_key_and_is_found_until_it_leaves() -> None:
    table: GroupTable[Group] = GroupTable()
    group, other = _keyed_group("a", 1, b"key"), _keyed_group("other", 2, None)
    table.add(group)
    table.add(other)
    joining = make_request("b", [1])
    assert table.join(joining, b"another key") is None
    assert table.join(joining, None) is None
    assert "b" not in table
    assert table.join(joining, b"key") is group
    assert (table.find("a"), table.find("b"), table.find("other"), table.find("c")) == (group, group, other, None)
    assert table.of(group.states[0]) is group
    assert table.at([2, 1]) == [other, group]
    table.withdraw(group.request_named("a"))
    assert [request.request_id for request in group.requests] == ["b"]
    assert "a" not in table


def test_an_ended_group_is_gone_and_may_be_dropped_during_iteration() -> None:
    table: GroupTable[Group] = GroupTable()
    for arrival, name in enumerate("abc"):
        table.add(_keyed_group(name, arrival, name.encode()))
    dropped = []
    for group in table:
        table.drop(group)
        dropped.append(group.request.request_id)
    assert dropped == ["a", "b", "c"]
    assert not any(name in table for name in "abc")
    assert table.join(make_request("d", [1]), b"a") is None
