"""Groups are found by their requests, their sequences and their keys, as long as they are unfinished."""

from __future__ import annotations

from engine.kv_cache.block_manager import BlockManager
from engine.request import Request
from engine.scheduling.groups import GroupTable, SequenceGroup
from engine.scheduling.sequence import RequestState
from tests.support.factories import make_request, make_state

Group = SequenceGroup[Request, RequestState]
BLOCKS = BlockManager(4, 4, prefix_caching=False)


def _group(name: str, arrival: int, key: bytes | None) -> Group:
    request = make_request(name, [1])
    return Group([request], (make_state(request, BLOCKS, arrival),), key)


def test_a_request_joins_the_group_of_its_key_and_is_found_until_it_leaves() -> None:
    table: GroupTable[Group] = GroupTable()
    group, other = _group("a", 1, b"key"), _group("other", 2, None)
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


def test_a_group_that_ended_is_gone_and_may_be_dropped_while_all_are_gone_through() -> None:
    table: GroupTable[Group] = GroupTable()
    for arrival, name in enumerate("abc"):
        table.add(_group(name, arrival, name.encode()))
    dropped = []
    for group in table:
        table.drop(group)
        dropped.append(group.request.request_id)
    assert dropped == ["a", "b", "c"]
    assert not any(name in table for name in "abc")
    assert table.join(make_request("d", [1]), b"a") is None
