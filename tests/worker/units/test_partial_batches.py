"""Batches that end early: what was done is in the output file, the rest in the error file."""

from __future__ import annotations

import pytest

from tests.support.fake_engine import answer
from tests.support.openai_batch import OpenAIBatch
from tests.support.registry import TestRegistry
from tests.support.request_lines import completion_line
from tests.support.units import Units, running_units
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import RunMode
from worker.schemas import JobState, SubmitOptions

REST = {"c", "d", "e"}
BATCH_TIMES = {
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"
}  # fmt: skip


def _with_two_of_five_done(registry: TestRegistry, units: Units) -> str:
    """A job of three shards, one of which ran."""
    job_id = registry.submit([completion_line(custom_id=name, prompt=name) for name in "abcde"])
    units.planner(shard_size=2).plan(units.hold(UnitRef.plan(job_id)))
    units.shard_run(units.hold(UnitRef.shard(job_id, 0))).run()
    assert registry.status(job_id).request_counts.completed == 2
    return job_id


def _times(found: OpenAIBatch) -> set[str]:
    return {name for name in BATCH_TIMES if getattr(found.batch, name) is not None}


def _check_files(found: OpenAIBatch, code: str) -> None:
    assert {name: body.choices[0].text for name, body in found.output.items()} == {"a": answer("a"), "b": answer("b")}
    assert {name: error.code for name, error in found.errors.items()} == dict.fromkeys(REST, code)
    assert (found.batch.output_file_id, found.batch.error_file_id) == (
        f"file-{found.batch.id}-output",
        f"file-{found.batch.id}-error",
    )
    assert found.batch.usage is not None
    assert found.batch.usage.output_tokens == 32  # of what was done


def test_an_expired_batch_keeps_what_was_done_and_says_so_of_the_rest(registry: TestRegistry) -> None:
    with running_units(registry) as units:
        job_id = _with_two_of_five_done(registry, units)
        registry.redis.hset(registry.keys.job(job_id), "deadline", 1_700_000_000_000)
        units.closer.close_unclaimed(UnitRef.shard(job_id, 1))
        assert OpenAIBatch.read(registry, job_id).batch.status == "finalizing"
        units.closer.close_unclaimed(UnitRef.shard(job_id, 2))
    found = OpenAIBatch.read(registry, job_id)
    _check_files(found, "batch_expired")
    assert found.batch.status == "expired"
    assert _times(found) == {"in_progress_at", "finalizing_at", "expired_at"}
    assert found.batch.finalizing_at == found.batch.expires_at == 1_700_000_000


def test_a_cancelled_batch_keeps_what_was_done_and_says_so_of_the_rest(registry: TestRegistry) -> None:
    with running_units(registry) as units:
        job_id = _with_two_of_five_done(registry, units)
        running = units.hold(UnitRef.shard(job_id, 1))
        for ref in registry.control.cancel(job_id):
            units.closer.close_unclaimed(ref)
        found = OpenAIBatch.read(registry, job_id)
        assert (found.batch.status, found.batch.output_file_id) == ("cancelling", None)
        assert found.errors.keys() == {"e"}
        units.closer.close(running.claim, running.claim.missing, RunMode.CANCELLED)
    found = OpenAIBatch.read(registry, job_id)
    _check_files(found, "batch_cancelled")
    assert found.batch.status == "cancelled"
    assert _times(found) == {"in_progress_at", "cancelling_at", "cancelled_at"}


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_batch_may_be_cancelled_while_it_is_validating(registry: TestRegistry, is_strict: bool) -> None:
    options = SubmitOptions(strict=is_strict)
    job_id = registry.submit([completion_line(custom_id=name) for name in "ab"], options)
    with running_units(registry) as units:
        for ref in registry.control.cancel(job_id):
            units.closer.close_unclaimed(ref)
    found = OpenAIBatch.read(registry, job_id)
    assert (found.batch.status, found.batch.output_file_id) == ("cancelled", None)
    assert {error.code for error in found.errors.values()} == {"batch_cancelled"}
    assert registry.status(job_id).status is JobState.CANCELLED
