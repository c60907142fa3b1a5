"""The trace context of a job, on its way through the registry."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from tests.support.registry import TestRegistry, must_claim
from worker.registry.keys import UnitRef
from worker.schemas import SubmitOptions

SUBMIT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PLAN = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"


def test_a_plan_has_that_of_the_submit(registry: TestRegistry) -> None:
    job_id = registry.submit([b"x"], SubmitOptions(traceparent=SUBMIT))

    assert must_claim(registry.leases(), UnitRef.plan(job_id)).traceparent == SUBMIT


@pytest.mark.parametrize(("of_plan", "of_shard"), [(PLAN, PLAN), ("", SUBMIT)])
def test_a_shard_has_that_of_the_plan_which_may_have_made_none(
    registry: TestRegistry, of_plan: str, of_shard: str
) -> None:
    job_id, leases = registry.submit([b"x"], SubmitOptions(traceparent=SUBMIT)), registry.leases()
    plan = must_claim(leases, UnitRef.plan(job_id))

    assert leases.planned(replace(plan, traceparent=of_plan), [[0]], ageing_s=60.0)

    assert must_claim(leases, UnitRef.shard(job_id, 0)).traceparent == of_shard


def test_a_job_may_come_without(registry: TestRegistry) -> None:
    job_id = registry.running_job([0])

    assert must_claim(registry.leases(), UnitRef.shard(job_id, 0)).traceparent == ""


def test_a_job_of_before_there_were_traces_has_none(registry: TestRegistry) -> None:
    job_id = registry.running_job([0])
    registry.redis.hdel(registry.keys.job(job_id), "trace")

    assert must_claim(registry.leases(), UnitRef.shard(job_id, 0)).traceparent == ""


@pytest.mark.parametrize("bad", ["", "garbage", SUBMIT.upper(), f"01{SUBMIT[2:]}", f"{SUBMIT}-more", f"{SUBMIT}\n"])
def test_what_is_no_trace_context_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError, match="traceparent"):
        SubmitOptions(traceparent=bad)
