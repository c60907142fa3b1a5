"""Plans of strict jobs: one bad line is the end of the job."""

from __future__ import annotations

import pytest

from tests.support.registry import TestRegistry, must_claim
from tests.support.request_lines import CHAT, COMPLETIONS, chat_line, completion_line
from tests.support.units import running_units
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import ClaimRefusal, StopReason
from worker.schemas import JobState, SubmitOptions

STRICT = SubmitOptions(strict=True)


def test_a_good_file_runs(registry: TestRegistry) -> None:
    job_id = registry.submit([completion_line(prompt=prompt, model="fake") for prompt in "cab"], STRICT)
    with running_units(registry) as units:
        units.planner(shard_size=3).plan(units.hold(UnitRef.plan(job_id)))
        assert units.hold(UnitRef.shard(job_id, 0)).claim.missing == (1, 2, 0)
    job = registry.status(job_id)
    assert (job.status, job.endpoint, job.model) == (JobState.IN_PROGRESS, COMPLETIONS, "fake")


@pytest.mark.parametrize("num_good_before", [0, 300])
def test_one_bad_line_fails_the_file_and_nothing_runs(registry: TestRegistry, num_good_before: int) -> None:
    lines = [completion_line()] * num_good_before + [b"{", completion_line(temperature=-1), completion_line()]
    job_id = registry.submit(lines, STRICT)
    with running_units(registry) as units:
        held = units.hold(UnitRef.plan(job_id))
        units.planner().plan(held)
        assert held.is_written
        assert units.leases.claim(UnitRef.shard(job_id, 0)) is ClaimRefusal.TERMINAL
    assert units.announcer.announced == []
    job = registry.status(job_id)
    assert (job.status, job.request_counts.total, job.request_counts.failed) == (JobState.FAILED, 0, 0)
    assert [(error.code, error.line, error.param) for error in job.errors] == [
        ("invalid_json_line", num_good_before + 1, None),
        ("invalid_request", num_good_before + 2, "temperature"),
    ]
    assert (job.error or "").startswith(f"2 of the file's {num_good_before + 3} lines are bad; line")
    assert registry.records(job_id) == []


def test_the_log_of_a_refusal_holds_nothing_of_the_file(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for line in (completion_line(temperature="secret"), completion_line(secret=1)):
        job_id = registry.submit([completion_line(), line], STRICT)
        with running_units(registry) as units:
            units.planner().plan(units.hold(UnitRef.plan(job_id)))
        assert "secret" in (registry.status(job_id).error or "")
        assert "the job was refused: 1 of 2 lines are bad; line 2: invalid_request" in caplog.messages
    assert "secret" not in caplog.text


def test_without_strict_the_same_lines_fail_alone(registry: TestRegistry) -> None:
    job_id = registry.submit([b"{", completion_line(), chat_line(custom_id="b", model="other")])
    with running_units(registry) as units:
        units.planner(shard_size=3).plan(units.hold(UnitRef.plan(job_id)))
    job = registry.status(job_id)
    assert (job.status, job.request_counts.failed, job.errors) == (JobState.IN_PROGRESS, 1, ())
    assert (job.endpoint, job.model) == (f"{COMPLETIONS},{CHAT}", "other")


def test_with_an_endpoint_only_the_lines_of_another_one_fail(registry: TestRegistry) -> None:
    job_id = registry.submit([completion_line(), chat_line()], SubmitOptions.model_validate({"endpoint": CHAT}))
    assert registry.status(job_id).endpoint == CHAT
    with running_units(registry) as units:
        units.planner().plan(units.hold(UnitRef.plan(job_id)))
        assert units.hold(UnitRef.shard(job_id, 0)).claim.missing == (1,)
    (record,) = registry.records(job_id)
    assert b'"code":"url_mismatch","line":1' in record


@pytest.mark.parametrize("reason", [StopReason.RELEASED, StopReason.FENCED, StopReason.CANCELLED])
def test_a_plan_told_to_stop_refuses_no_file(registry: TestRegistry, reason: StopReason) -> None:
    job_id = registry.submit([b"{", completion_line()], STRICT)
    with running_units(registry) as units:
        held = units.hold(UnitRef.plan(job_id))
        if reason is StopReason.CANCELLED:
            registry.control.cancel(job_id)
        held.stop(reason)
        units.planner().plan(held)
    job = registry.status(job_id)
    expected = JobState.CANCELLED if reason is StopReason.CANCELLED else JobState.VALIDATING
    assert (job.status, job.errors) == (expected, ())


def test_a_job_cancelled_while_its_plan_ends_is_cancelled_and_not_failed(registry: TestRegistry) -> None:
    job_id = registry.submit([b"{", completion_line()], STRICT)
    with running_units(registry) as units:
        held = units.hold(UnitRef.plan(job_id))
        registry.control.cancel(job_id)  # the planner has not heard of it yet
        units.planner().plan(held)
    job = registry.status(job_id)
    assert (job.status, job.errors, job.request_counts.failed) == (JobState.CANCELLED, (), 2)
    assert b"batch_cancelled" in registry.records(job_id)[1]


def test_a_fenced_planner_refuses_no_file(registry: TestRegistry) -> None:
    job_id = registry.submit([b"{"], STRICT)
    with running_units(registry) as units:
        held = units.hold(UnitRef.plan(job_id))
        units.leases.release(held.claim, count_attempt=False)
        units.planner().plan(held)
    assert held.stop_reason is StopReason.FENCED
    assert registry.status(job_id).status is JobState.VALIDATING
    assert must_claim(registry.leases(), UnitRef.plan(job_id)).is_strict
