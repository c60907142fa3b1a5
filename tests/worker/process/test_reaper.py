from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
import redis

from tests.support.registry import TestRegistry
from tests.support.running_thread import running_thread
from tests.support.units import Units, running_units
from tests.support.wait_until import wait_until
from worker.registry.keys import UnitRef
from worker.registry.queues import DueUnit, ReapQueue
from worker.runtime.lease_keeper import Reaper
from worker.schemas import JobState, SubmitOptions


def _reaper(units: Units, due_units: ReapQueue | None = None, is_well: Callable[[], bool] = lambda: True) -> Reaper:
    queue = due_units or units.registry.reap_queue(grace_s=0.1)
    return Reaper(queue, units.announcer, units.closer, interval_s=0.05, is_well=is_well)


def test_a_worker_that_hangs_puts_no_unit_off(registry: TestRegistry) -> None:
    job_id = registry.running_job([0])
    registry.make_due()
    with running_units(registry) as units, running_thread(_reaper(units, is_well=lambda: False).run):
        time.sleep(0.3)
    assert [due.ref for due in registry.reap_queue().due()] == [UnitRef.shard(job_id, 0)]


def test_lost_messages_are_sent_again(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1], options=SubmitOptions(priority=8))
    with running_units(registry) as units:
        units.hold(UnitRef.shard(job_id, 0))
        registry.make_due()
        with running_thread(_reaper(units).run):
            wait_until(lambda: units.announcer.announced)
        assert set(units.announcer.announced) == {(UnitRef.shard(job_id, 1), 8)}


def test_units_of_jobs_that_are_to_end_are_closed_without_a_message(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job_id = registry.running_job([0], [1])
    registry.control.cancel(job_id)
    with running_units(registry) as units:
        with running_thread(_reaper(units).run):
            wait_until(lambda: registry.status(job_id).status is JobState.CANCELLED)
        assert units.announcer.announced == []
    [end] = [record for record in caplog.records if record.message == "job finished"]
    assert end.__dict__["job_id"] == job_id


def test_a_reaper_outlives_a_redis_that_is_away(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[list[DueUnit] | Exception] = [redis.ConnectionError("away")]
    due = DueUnit(UnitRef.shard("s0-" + "0" * 36, 1), 4, should_close=False)

    def scripted() -> list[DueUnit]:
        answer = answers.pop(0) if answers else [due]
        if isinstance(answer, Exception):
            raise answer
        return answer

    queue = registry.reap_queue()
    monkeypatch.setattr(queue, "due", scripted)
    with (
        caplog.at_level(logging.WARNING),
        running_units(registry) as units,
        running_thread(_reaper(units, queue).run),
    ):
        wait_until(lambda: units.announcer.announced)
    assert "away" in caplog.text
    assert units.announcer.announced[0] == (due.ref, 4)
