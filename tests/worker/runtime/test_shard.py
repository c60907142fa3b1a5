"""A shard's prompts from its lines to its records."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.support.fake_engine import FAIL, REFUSE, FakeEngine, GatedEngine, answer
from tests.support.processes import is_waiting, wait_until
from tests.support.registry import RecordingAnnouncer, TestRegistry, Units, must_claim, ok, running_units
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, NewShard
from worker.registry.lifecycle import PutStatus, StopReason
from worker.runtime.held_units import HeldUnit, HeldUnits
from worker.runtime.shard import MAX_READ_AHEAD, READ_AHEAD, Turn
from worker.runtime.unit_runner import SLOTS_PER_RESERVED, ShardSlots
from worker.schemas import JobState, SubmitOptions

ENDLESS = 1_000_000  # steps


def _hold_job(units: Units, prompts: list[str], options: SubmitOptions | None = None) -> HeldUnit:
    """The held shard of a job that has no other."""
    lines = [json.dumps({"prompt": prompt}).encode() for prompt in prompts]
    job_id = units.registry.submit(lines, options)
    plan = must_claim(units.leases, UnitRef.plan(job_id))
    assert units.leases.planned(plan, [NewShard(range(len(prompts)))], ageing_s=60.0) is PutStatus.UNIT_DONE
    return units.hold(UnitRef.shard(job_id, 0))


def _records(units: Units, held: HeldUnit) -> dict[int, dict[str, Any]]:
    records = [json.loads(record) for record in units.registry.records(held.claim.ref.job_id)]
    return {int(record["custom_id"].removeprefix("line-")) - 1: record for record in records}


def _start(units: Units, held: HeldUnit) -> threading.Thread:
    thread = threading.Thread(target=units.shard_run(held).run)
    thread.start()
    return thread


def test_a_shard_runs_to_its_last_record(registry: TestRegistry) -> None:
    prompts = [f"prompt {number}" for number in range(100)]
    with running_units(registry, max_open=7) as units:
        held = _hold_job(units, prompts)
        units.shard_run(held).run()
        records = _records(units, held)
        assert units.engine.most_open <= 7
    texts = [records[index]["response"]["body"]["choices"][0]["text"] for index in range(100)]
    assert texts == [answer(prompt) for prompt in prompts]
    job = registry.status(held.claim.ref.job_id)
    assert (job.status, job.request_counts.completed, job.usage.output_tokens) == (JobState.COMPLETED, 100, 1600)


def test_only_what_has_no_record_runs(registry: TestRegistry) -> None:
    with running_units(registry) as units:
        earlier = _hold_job(units, ["a", "b", "c"])
        units.leases.put(earlier.claim, [ok(1, '{"custom_id": "line-2", "kept": true}')])
        units.leases.release(earlier.claim, count_attempt=False)
        held = units.hold(earlier.claim.ref)
        units.shard_run(held).run()
        assert _records(units, held)[1] == {"custom_id": "line-2", "kept": True}
        assert units.engine.most_open <= 2


def test_a_prompt_that_fails_costs_only_itself(registry: TestRegistry) -> None:
    with running_units(registry) as units:
        held = _hold_job(units, ["a", REFUSE, FAIL, "x" * 5000, "b"])
        units.shard_run(held).run()
        records = _records(units, held)
    codes = [records[index]["response"]["status_code"] for index in range(5)]
    assert codes == [200, 400, 503, codes[3], 200]
    assert records[1]["response"]["body"]["error"]["code"] == "refused"


def test_a_defect_of_ours_over_one_prompt_is_its_error_record(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_units(registry) as units:
        held = _hold_job(units, ["a", "b"])
        encode = units.engine.tokenizer.encode

        def failing(text: str, *, add_special_tokens: bool = True) -> list[int]:
            if text == "b":
                raise ZeroDivisionError
            return encode(text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr(units.engine.tokenizer, "encode", failing)
        units.shard_run(held).run()
        records = _records(units, held)
    assert [records[index]["response"]["status_code"] for index in (0, 1)] == [200, 500]


@pytest.mark.parametrize("reason", [StopReason.CANCELLED, StopReason.EXPIRED])
def test_a_shard_whose_job_ends_keeps_results_and_closes_the_rest(registry: TestRegistry, reason: StopReason) -> None:
    with running_units(registry, FakeEngine(steps_per_request=3, step_s=0.01, slots=2)) as units:
        held = _hold_job(units, [f"p{number}" for number in range(50)])
        thread = _start(units, held)
        wait_until(lambda: registry.records(held.claim.ref.job_id))
        if reason is StopReason.CANCELLED:
            registry.control.cancel(held.claim.ref.job_id)
        held.stop(reason)
        thread.join(20)
        records = _records(units, held)
        wait_until(lambda: units.engine_thread.is_idle)
        assert units.engine.num_aborted > 0
    assert sorted(records) == list(range(50))
    codes = [record["error"]["code"] if record["error"] else "ok" for record in records.values()]
    expected = {StopReason.CANCELLED: "batch_cancelled", StopReason.EXPIRED: "batch_expired"}[reason]
    assert set(codes) == {"ok", expected}
    state = registry.status(held.claim.ref.job_id).status
    assert state.value == expected.removeprefix("batch_")


def test_cancelling_frees_the_engine_within_a_step(registry: TestRegistry) -> None:
    steps_at_abort: list[int] = []

    class Watched(GatedEngine):
        def abort(self, request_id: str) -> bool:
            steps_at_abort.append(self.stats().num_steps)
            return super().abort(request_id)

    engine = Watched(steps_per_request=ENDLESS, step_s=0.001)
    with running_units(registry, engine) as units:
        held = _hold_job(units, ["a", "b"])
        thread = _start(units, held)
        wait_until(lambda: engine.most_open == 2)  # the first step has begun, or is about to
        held.stop(StopReason.CANCELLED)
        wait_until(lambda: units.engine_thread._aborts)
        engine.goes_on.set()
        wait_until(lambda: engine.num_aborted == 2)
        assert steps_at_abort == [1, 1]
        thread.join(20)


@pytest.mark.parametrize("reason", [StopReason.RELEASED, StopReason.ENGINE_FAILED, StopReason.FENCED])
def test_a_shard_that_is_given_up_writes_nothing_more(registry: TestRegistry, reason: StopReason) -> None:
    with running_units(registry, FakeEngine(steps_per_request=ENDLESS, step_s=0.001)) as units:
        held = _hold_job(units, ["a", "b"])
        thread = _start(units, held)
        wait_until(lambda: units.engine_thread.num_steps > 0)
        held.stop(reason)
        thread.join(20)
        assert not thread.is_alive()
        wait_until(lambda: units.engine_thread.is_idle)
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)
    assert _records(units, held) == {}


def test_a_worker_that_lost_its_lease_stops_as_soon_as_it_writes(registry: TestRegistry) -> None:
    with running_units(registry, FakeEngine(steps_per_request=5, step_s=0.01, slots=1)) as units:
        held = _hold_job(units, ["a", "b", "c", "d"])
        registry.lapse(held.claim.ref)
        taken = must_claim(registry.leases(owner="other"), held.claim.ref, alone=True)
        units.shard_run(held).run()
        assert held.stop_reason is StopReason.FENCED
        assert registry.leases().renew([taken])[0][0] is PutStatus.OPEN
    assert _records(units, held) == {}


def test_prompts_of_tenants_get_their_salt_and_priority(registry: TestRegistry) -> None:
    seen: list[tuple[int, str]] = []

    class Watched(FakeEngine):
        def add_request(self, request: Any) -> None:
            seen.append((request.priority, request.tenant))
            super().add_request(request)

    with running_units(registry, Watched()) as units:
        held = _hold_job(units, ["a"], SubmitOptions(priority=2, tenant="acme"))
        units.shard_run(held).run()
    assert seen == [(2, "acme")]


@pytest.mark.parametrize("reason", [StopReason.RELEASED, StopReason.ENGINE_FAILED])
def test_what_had_finished_when_a_shard_is_given_back_is_written(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch, reason: StopReason
) -> None:
    with running_units(registry, FakeEngine(slots=3)) as units:
        held = _hold_job(units, ["a", "b", "c", "d"])
        put = units.writer.put

        def put_late(held: HeldUnit, *records: Any) -> Any:
            wait_until(lambda: units.engine_thread.num_open_requests == 0)  # the other outputs wait behind this one
            held.stop(reason)
            return put(held, *records)

        monkeypatch.setattr(units.writer, "put", put_late)
        units.shard_run(held).run()
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)
        assert sorted(_records(units, held)) == [0, 1, 2, 3]


def test_no_more_lines_are_read_than_the_engine_will_soon_take(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(steps_per_request=ENDLESS, step_s=0.001)
    with running_units(registry, engine, max_open=8) as units:
        held = _hold_job(units, [f"p{number:03}" for number in range(200)])
        read: list[int] = []
        lines_and_resume_states = units.leases.lines_and_resume_states

        def counted(job_id: str, indices: Sequence[int], *, under: Claim) -> list[tuple[bytes | None, bytes | None]]:
            read.append(len(indices))
            return lines_and_resume_states(job_id, indices, under=under)

        monkeypatch.setattr(units.leases, "lines_and_resume_states", counted)
        thread = _start(units, held)
        wait_until(lambda: sum(read) == READ_AHEAD and units.engine_thread.num_open_requests == 8)
        steps = units.engine_thread.num_steps
        wait_until(lambda: units.engine_thread.num_steps > steps + 20)
        assert sum(read) == READ_AHEAD
        units.engine_thread.abort(engine.open_request_ids)
        wait_until(lambda: read == [READ_AHEAD, MAX_READ_AHEAD])  # the lines are short
        held.stop(StopReason.FENCED)
        thread.join(20)


def test_prompts_of_two_shards_go_into_the_engine_side_by_side(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    offered: list[None] = []

    class Watched(GatedEngine):
        def add_request(self, request: Any) -> None:
            order.append(bytes(request.prompt_token_ids).decode())
            super().add_request(request)

    engine = Watched(slots=1)
    with running_units(registry, engine, max_open=1) as units:
        offer = units.engine_thread.offer

        def offer_and_tell(*prompts: Any, **options: Any) -> None:
            offer(*prompts, **options)
            offered.append(None)

        monkeypatch.setattr(units.engine_thread, "offer", offer_and_tell)
        shards = [_hold_job(units, ["a", "c", "e", "g"]), _hold_job(units, ["b", "d", "f", "h"])]
        threads = [_start(units, held) for held in shards]
        wait_until(lambda: len(offered) == 2)
        engine.goes_on.set()
        for thread in threads:
            thread.join(10)
    assert "".join(order[-6:]) == "cdefgh"


def _slots(registry: TestRegistry, held_units: HeldUnits, max_shards: int) -> ShardSlots:
    return ShardSlots(registry.shard_queue(), held_units, RecordingAnnouncer(), max_shards, turn=Turn())


def test_one_tenant_never_has_the_last_slot(registry: TestRegistry) -> None:
    max_shards = SLOTS_PER_RESERVED
    large = registry.running_job(*[[n] for n in range(max_shards + 1)], options=SubmitOptions(tenant="large"))
    hint, held_units, leases = UnitRef.shard(large, 0), HeldUnits(), registry.leases()
    slots = _slots(registry, held_units, max_shards)
    for _ in range(max_shards - 1):
        chosen = slots.choose(hint)
        assert chosen is not None
        held_units.hold(must_claim(leases, chosen), message_id="m")
    assert slots.choose(hint) is None
    small = registry.running_job([0], options=SubmitOptions(tenant="small"))
    assert slots.choose(hint) == UnitRef.shard(small, 0)


def test_few_slots_are_for_whoever_comes(registry: TestRegistry) -> None:
    job = registry.running_job([0], [1])
    held_units = HeldUnits()
    slots = _slots(registry, held_units, 2)
    held_units.hold(must_claim(registry.leases(), UnitRef.shard(job, 0)), message_id="m")
    assert slots.choose(UnitRef.shard(job, 0)) == UnitRef.shard(job, 1)


def test_no_more_slots_are_taken_than_there_are(registry: TestRegistry) -> None:
    slots = _slots(registry, HeldUnits(), 1)
    assert slots.take(0.01)
    assert not slots.take(0.01)
    slots.give()
    assert slots.take(0.01)


def test_a_thread_that_claims_goes_before_those_that_make_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, order = Turn(), []

    def claim() -> None:
        with turn.to_claim(30.0) as has_turn:
            assert has_turn
            order.append("claims")

    def make() -> None:
        with turn.to_make_requests():
            order.append("makes requests")

    monkeypatch.setattr("worker.runtime.shard.TURN_WAIT_S", 30.0)
    threads = [threading.Thread(target=target) for target in (make, make, claim, claim)]
    with turn.to_claim(0.0):
        for thread in threads:
            thread.start()
            wait_until(partial(is_waiting, thread))
    make()  # nor does this thread, though those that were told of their turn have not woken up yet
    for thread in threads:
        thread.join()
    assert order == ["claims"] * 2 + ["makes requests"] * 3


def test_one_thread_claims_at_a_time_and_requests_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.shard.TURN_WAIT_S", 0.01)
    turn = Turn()
    with turn.to_claim(0.01) as first:
        with turn.to_claim(0.01) as second, turn.to_make_requests():  # as if that claim waited for Redis
            assert (first, second) == (True, False)
        with turn.to_claim(0.01) as third:
            assert not third
    with turn.to_claim(0.01) as last:
        assert last
