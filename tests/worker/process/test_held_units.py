from __future__ import annotations

from worker.registry.keys import UnitRef
from worker.registry.leases import Claim
from worker.registry.lifecycle import RunMode, StopReason
from worker.runtime.held_units import HeldUnit, HeldUnits


def _claim(number: int) -> Claim:
    return Claim(UnitRef.shard("j", number), "1:t", RunMode.RUN, None, 0, 5, "t", 0, 1, (0,))


def test_the_unit_of_a_message_is_told_to_stop_and_no_other() -> None:
    held_units = HeldUnits()
    mine, other = held_units.hold(_claim(0), message_id="mine"), held_units.hold(_claim(1), message_id="other")
    held_units.stop_message("mine", StopReason.RELEASED)
    assert (mine.stop_reason, other.stop_reason) == (StopReason.RELEASED, None)


def test_a_unit_that_is_being_claimed_when_its_message_is_stopped_stops_once_it_is_held() -> None:
    held_units = HeldUnits()
    held_units.stop_message("mine", StopReason.RELEASED)
    mine = held_units.hold(_claim(0), message_id="mine")
    assert mine.stop_reason is StopReason.RELEASED
    held_units.remove(mine)
    assert held_units.hold(_claim(1), message_id="mine").stop_reason is None


def test_who_asked_is_told_when_a_unit_is_held_and_when_no_more() -> None:
    begun: list[HeldUnit] = []
    ended: list[HeldUnit] = []
    held_units = HeldUnits(on_held=begun.append, on_removed=ended.append)
    mine = held_units.hold(_claim(0), message_id="mine")
    assert not held_units.wait_empty(0)
    assert (begun, ended) == ([mine], [])
    held_units.remove(mine)
    assert held_units.wait_empty(0)
    assert (begun, ended) == ([mine], [mine])
