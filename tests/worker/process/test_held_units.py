from __future__ import annotations

from worker.process.held_unit import HeldUnit
from worker.process.held_units import HeldUnits
from worker.registry.claim import Claim
from worker.registry.run_mode import RunMode
from worker.registry.stop_reason import StopReason
from worker.registry.unit_ref import UnitRef


def _unit(number: int, message_id: str) -> HeldUnit:
    claim = Claim(UnitRef.shard("j", number), "1:t", RunMode.RUN, None, 0, 5, "t", 0, 1, (0,))
    return HeldUnit(claim, message_id=message_id)


def test_the_unit_of_a_message_is_told_to_stop_and_no_other() -> None:
    held_units, mine, other = HeldUnits(), _unit(0, "mine"), _unit(1, "other")
    held_units.add(mine)
    held_units.add(other)
    held_units.stop_message("mine", StopReason.RELEASED)
    assert (mine.stop_reason, other.stop_reason) == (StopReason.RELEASED, None)


def test_a_unit_that_is_being_claimed_when_its_message_is_stopped_stops_once_it_is_held() -> None:
    held_units, mine, next_one = HeldUnits(), _unit(0, "mine"), _unit(1, "mine")
    held_units.stop_message("mine", StopReason.RELEASED)
    held_units.add(mine)
    assert mine.stop_reason is StopReason.RELEASED
    held_units.remove(mine)
    held_units.add(next_one)
    assert next_one.stop_reason is None


def test_who_asked_is_told_when_a_unit_is_held_no_more() -> None:
    ended: list[HeldUnit] = []
    held_units, mine = HeldUnits(on_removed=ended.append), _unit(0, "mine")
    held_units.add(mine)
    assert not held_units.wait_empty(0)
    held_units.remove(mine)
    assert held_units.wait_empty(0)
    assert ended == [mine]
