from __future__ import annotations

from tests.support.doctor import found_at
from tests.support.registry import TestRegistry
from worker.doctor.report import Level
from worker.registry.leases import Heartbeats
from worker.schemas import WorkerInfo


def beat(registry: TestRegistry, name: str, version: str = "0.1.0") -> None:
    info = WorkerInfo(id=name, version=version, model="tiny", steps=1, open_requests=0, held=0)
    Heartbeats(registry.redis, registry.keys).beat(info)


def test_workers_are_told_with_their_version_and_model(redis_url: str, registry: TestRegistry) -> None:
    beat(registry, "a")
    beat(registry, "b")

    finding = found_at(redis_url)["workers"]

    assert (finding.level, finding.detail) == (Level.OK, "2 up, version 0.1.0, with tiny")


def test_workers_of_two_versions_are_a_warning(redis_url: str, registry: TestRegistry) -> None:
    beat(registry, "a")
    beat(registry, "b", version="0.2.0")

    finding = found_at(redis_url)["workers"]

    assert finding.level is Level.WARNING
    assert "version 0.1.0, 0.2.0" in finding.detail


def test_jobs_without_a_worker_are_a_warning_that_says_how_to_start_one(redis_url: str, registry: TestRegistry) -> None:
    registry.submit([b'{"prompt": "a"}'])

    finding = found_at(redis_url)["workers"]

    assert (finding.level, finding.detail) == (Level.WARNING, "none is up, and 1 jobs wait for one")
    assert "millrace worker --model DIR" in str(finding.fix)


def test_jobs_with_a_worker_are_well(redis_url: str, registry: TestRegistry) -> None:
    registry.submit([b'{"prompt": "a"}'])
    beat(registry, "a")

    assert found_at(redis_url)["workers"].level is Level.OK


def test_an_idle_queue_needs_no_worker(redis_url: str) -> None:
    assert found_at(redis_url)["workers"].level is Level.OK


def test_a_heartbeat_of_another_version_is_a_warning_and_no_traceback(redis_url: str, registry: TestRegistry) -> None:
    registry.redis.hset(f"{registry.keys.workers}a", mapping={"version": "9.0", "mood": "good"})

    finding = found_at(redis_url)["workers"]

    assert finding.level is Level.WARNING
    assert "another version" in finding.detail
