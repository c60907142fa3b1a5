"""Groups of sequences: which requests wait for them, and how they are found."""

from __future__ import annotations

import pytest

from engine.errors import EngineUnavailable, GrammarFailed, InvalidRequest, NonFiniteLogits
from engine.kv_cache.block_manager import BlockManager
from engine.request import FinishReason, Request
from engine.scheduling.sequence import RequestState
from engine.unfinished import GroupTable, SequenceGroup
from tests.support.engines import make_request, make_state

Group = SequenceGroup[Request, RequestState]

BLOCKS = BlockManager(4, 4, prefix_caching=False)


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
