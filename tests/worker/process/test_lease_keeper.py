from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import redis

from engine.request import Request
from engine.sampling_params import SamplingParams
from settings import WorkerSettings
from tests.support.fake_engine import FakeEngine
from tests.support.feeds import fed
from tests.support.registry import TestRegistry
from tests.support.running_thread import running_thread
from tests.support.units import Units, running_units
from tests.support.wait_until import wait_until
from worker.registry.keys import UnitRef
from worker.registry.leases import Heartbeats
from worker.registry.lifecycle import ClaimRefusal, StopReason
from worker.runtime.lease_keeper import LeaseKeeper
from worker.schemas import SubmitOptions, WorkerInfo

INFO = WorkerInfo(id="w1", version="1", model="m", steps=3, open_requests=2, held=1)
LEASE_S = 0.4


@contextmanager
def _keeping(units: Units, *, hang_timeout_s: float = 60) -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(
        units.leases,
        Heartbeats(units.registry.redis, units.registry.keys),
        units.held_units,
        units.engine_thread,
        settings=WorkerSettings(lease_s=LEASE_S, renew_interval_s=0.1, hang_timeout_s=hang_timeout_s),
        describe=lambda: INFO,
    )
    with running_thread(keeper.run):
        yield keeper


def _running_request(units: Units) -> AbstractContextManager[object]:
    return fed(units.engine_thread, [Request("r", [65], SamplingParams())])


def test_leases_are_kept_while_the_engine_is_idle(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    with running_units(registry, lease_s=LEASE_S) as units, _keeping(units):
        held = units.hold(shard)
        time.sleep(LEASE_S * 2)
        assert units.leases.claim(shard) is ClaimRefusal.BUSY
        assert held.stop_reason is None


def test_leases_are_kept_while_the_engine_advances(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    engine = FakeEngine(steps_per_request=1_000_000, step_s=0.02)
    with running_units(registry, engine, lease_s=LEASE_S) as units, _keeping(units), _running_request(units):
        units.hold(shard)
        time.sleep(LEASE_S * 2)
        assert units.leases.claim(shard) is ClaimRefusal.BUSY


def test_a_slow_step_keeps_its_leases(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    engine = FakeEngine(step_s=1.5)
    with running_units(registry, engine, lease_s=LEASE_S) as units, _keeping(units), _running_request(units):
        units.hold(shard)
        time.sleep(LEASE_S * 2)
        assert units.leases.claim(shard) is ClaimRefusal.BUSY


def test_an_engine_that_hangs_loses_its_leases(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    engine = FakeEngine(step_s=1.5)  # one step outlasts several leases
    with running_units(registry, engine, lease_s=LEASE_S) as units, _keeping(units, hang_timeout_s=0.5):
        units.hold(shard)
        with _running_request(units):
            wait_until(lambda: units.leases.claim(shard) is not ClaimRefusal.BUSY, timeout_s=2)


def test_the_owner_of_a_cancelled_job_is_told_within_a_second(registry: TestRegistry) -> None:
    job_id = registry.running_job([0])
    with running_units(registry) as units, _keeping(units):
        held = units.hold(UnitRef.shard(job_id, 0))
        time.sleep(0.15)
        assert held.stop_reason is None
        registry.control.cancel(job_id)
        wait_until(lambda: held.stop_reason is StopReason.CANCELLED, timeout_s=1)


def test_the_owner_is_told_of_the_deadline(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], options=SubmitOptions(deadline_s=0.3))
    with running_units(registry) as units, _keeping(units):
        held = units.hold(UnitRef.shard(job_id, 0))
        assert held.stop_reason is None
        wait_until(lambda: held.stop_reason is StopReason.EXPIRED, timeout_s=1.5)


def test_the_owner_is_told_that_another_has_its_unit(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    with running_units(registry) as units:
        held = units.hold(shard)
        units.leases.release(held.claim, count_attempt=False)
        with _keeping(units):
            wait_until(lambda: held.stop_reason is StopReason.FENCED)


def test_the_heartbeat_is_there_while_the_keeper_runs(registry: TestRegistry) -> None:
    with running_units(registry) as units:
        with _keeping(units):
            wait_until(lambda: registry.workers() == [INFO])
            assert 0 < registry.redis.ttl(f"{registry.keys.workers}w1") <= 30
        assert registry.workers() == []


def test_the_heartbeat_is_overdue_while_redis_takes_no_writes(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'.")

    with running_units(registry) as units, _keeping(units) as keeper:
        wait_until(lambda: registry.workers() == [INFO])
        assert keeper.overdue_s < 1
        with monkeypatch.context() as full:
            full.setattr(Heartbeats, "beat", refuse)
            wait_until(lambda: keeper.overdue_s >= 1, timeout_s=5)
        wait_until(lambda: keeper.overdue_s == 0, timeout_s=5)
