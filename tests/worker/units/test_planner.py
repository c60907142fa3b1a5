from __future__ import annotations

import json
import tracemalloc
from typing import Any

from tests.support.registry import TestRegistry, ok
from tests.support.units import running_units
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import ClaimRefusal, StopReason
from worker.runtime.planner import CHUNK
from worker.schemas import JobState, SubmitOptions


def _line(prompt: str, custom_id: str | None = None) -> bytes:
    line: dict[str, Any] = {"prompt": prompt}
    if custom_id is not None:
        line["custom_id"] = custom_id
    return json.dumps(line).encode()


def _codes(registry: TestRegistry, job_id: str) -> dict[int, str]:
    records = [json.loads(record) for record in registry.records(job_id)]
    return {
        record["response"]["body"]["error"]["line"]: record["response"]["body"]["error"]["code"] for record in records
    }


def test_good_lines_are_cut_into_shards_in_prefix_order(registry: TestRegistry) -> None:
    prompts = ["b: 1", "a: 2", "b: 0", "a: 1", "c"]
    job_id = registry.submit([_line(prompt) for prompt in prompts], SubmitOptions(priority=3))
    with running_units(registry) as units:
        units.planner(shard_size=2).plan(units.hold(UnitRef.plan(job_id)))
        shards = [units.hold(UnitRef.shard(job_id, number)).claim.missing for number in range(3)]
    assert shards == [(3, 1), (2, 0), (4,)]
    assert units.announcer.announced == [(UnitRef.shard(job_id, number), 3) for number in range(3)]
    assert registry.status(job_id).shards_total == 3


def test_bad_lines_get_their_record_at_once_and_the_others_run(registry: TestRegistry) -> None:
    lines = [_line("a", "x"), b"{", _line("b", "x"), b"\xff", _line("c", "y"), b'{"prompt": 7}']
    job_id = registry.submit(lines)
    with running_units(registry) as units:
        units.planner(shard_size=10).plan(units.hold(UnitRef.plan(job_id)))
        assert units.hold(UnitRef.shard(job_id, 0)).claim.missing == (0, 4)
    codes = _codes(registry, job_id)
    assert sorted(codes) == [2, 3, 4, 6]
    assert codes[3] == "duplicate_custom_id"
    assert registry.status(job_id).request_counts.failed == 4


def test_a_job_of_bad_lines_only_is_completed_by_its_plan(registry: TestRegistry) -> None:
    job_id = registry.submit([b"{", b"[", b"}"])
    with running_units(registry) as units:
        held = units.hold(UnitRef.plan(job_id))
        units.planner().plan(held)
    assert held.is_written
    job = registry.status(job_id)
    assert (job.status, job.request_counts.failed) == (JobState.COMPLETED, 3)


def test_an_interrupted_plan_starts_again_and_writes_nothing_twice(registry: TestRegistry) -> None:
    job_id = registry.submit([_line("a", "x"), b"{", _line("b", "x"), b"["])
    with running_units(registry) as units:
        first = units.hold(UnitRef.plan(job_id))
        units.leases.put(first.claim, [ok(1, '{"response": {"body": {"error": {"line": 2, "code": "mine"}}}}')])
        units.leases.release(first.claim, count_attempt=False)
        units.planner().plan(units.hold(UnitRef.plan(job_id)))
        assert units.hold(UnitRef.shard(job_id, 0)).claim.missing == (0,)
    codes = _codes(registry, job_id)
    assert codes == {2: "mine", 3: "duplicate_custom_id", 4: "invalid_json_line"}


def test_a_line_that_vanished_is_an_error_and_not_a_hole(registry: TestRegistry) -> None:
    job_id = registry.submit([_line("a"), _line("b")])
    registry.redis.hdel(registry.keys.lines(job_id), "1")
    with running_units(registry) as units:
        units.planner().plan(units.hold(UnitRef.plan(job_id)))
    assert _codes(registry, job_id) == {2: "missing_line"}


def test_a_fenced_planner_cuts_nothing(registry: TestRegistry) -> None:
    job_id = registry.submit([_line("a")])
    with running_units(registry) as units:
        held = units.hold(UnitRef.plan(job_id))
        units.leases.release(held.claim, count_attempt=False)
        units.planner().plan(held)
        assert units.leases.claim(UnitRef.shard(job_id, 0)) is ClaimRefusal.TERMINAL
    assert held.stop_reason is StopReason.FENCED
    assert units.announcer.announced == []


def test_a_job_cancelled_while_it_is_planned_is_closed(registry: TestRegistry) -> None:
    job_id = registry.submit([_line("a"), b"{", b"["])
    with running_units(registry) as units:
        held = units.hold(UnitRef.plan(job_id))
        registry.control.cancel(job_id)
        units.planner().plan(held)
    job = registry.status(job_id)
    assert (job.status, job.request_counts.failed) == (JobState.CANCELLED, 3)


def test_a_plan_holds_some_of_the_lines_at_a_time(registry: TestRegistry) -> None:
    lines = [_line(f"{number} ".ljust(20_000, "x")) for number in range(10 * CHUNK)]
    job_id = registry.submit(lines)
    size = sum(map(len, lines))
    del lines
    with running_units(registry) as units:
        held = units.hold(UnitRef.plan(job_id))
        tracemalloc.start()
        try:
            units.planner(shard_size=1000).plan(held)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < size / 2, f"{peak} of {size} bytes"


def test_of_a_models_long_name_a_job_keeps_the_beginning(registry: TestRegistry) -> None:
    job_id = registry.submit([json.dumps({"prompt": "a", "model": "m" * 100_000}).encode()])
    with running_units(registry) as units:
        units.planner().plan(units.hold(UnitRef.plan(job_id)))
    assert registry.status(job_id).model == "m" * 200
