"""Plans: how a job's file becomes shards, and when a strict job is refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.processes import running_thread, wait_until
from tests.support.registry import TestRegistry, must_claim, ok, running_units
from tests.support.request_lines import CHAT, COMPLETIONS, batch_line, chat_line, completion_line
from worker.lines.errors import LineError
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import ClaimRefusal, StopReason
from worker.registry.models import Announcement
from worker.runtime.planner import CHUNK, MAX_ERRORS, FileRefusal
from worker.schemas import JobState, JobStatus, SubmitOptions

STRICT = SubmitOptions(strict=True)


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


def _plan(registry: TestRegistry, *lines: bytes, known: Sequence[str] = (), **options: object) -> JobStatus:
    """A job of these lines, planned by a worker that serves `fake`, in shards of two lines."""
    job_id = registry.submit(lines, SubmitOptions.model_validate(options))
    with running_units(registry) as units:
        units.planner(known=known).plan(units.hold(UnitRef.plan(job_id)))
        assert [unit for unit, _ in units.announcer.announced] == [
            UnitRef.shard(job_id, number) for number in range(registry.status(job_id).shards_total)
        ]
    return registry.status(job_id)


def _models(registry: TestRegistry, job: JobStatus) -> list[tuple[str, tuple[int, ...]]]:
    """The model of each of the job's shards and the lines in it."""
    leases = registry.leases(models=["fake", "other", "later"])
    claims = [must_claim(leases, UnitRef.shard(job.id, number)) for number in range(job.shards_total)]
    return [(claim.model, claim.missing) for claim in claims]


def test_lines_that_name_several_models_are_split_to_them(registry: TestRegistry) -> None:
    registry.serve("other")
    names = ["other", "fake", "hub/other", "fake", "fake"]
    job = _plan(registry, *(completion_line(model=name, custom_id=str(n)) for n, name in enumerate(names)))
    assert (job.model, job.waiting_for) == (None, ())
    assert _models(registry, job) == [("fake", (1, 3)), ("fake", (4,)), ("other", (0, 2))]


def test_a_job_that_names_no_model_is_pinned_to_the_only_one(registry: TestRegistry) -> None:
    job = _plan(registry, completion_line())
    assert (job.model, _models(registry, job)) == ("fake", [("fake", (0,))])


def test_a_line_that_names_no_model_is_for_the_one_that_serves_it(registry: TestRegistry) -> None:
    embedder = Announcement(name="embedder", endpoints=("/v1/embeddings",))
    registry.directory("embedding-worker").announce(embedder)
    job = _plan(registry, completion_line())
    assert _models(registry, job) == [("fake", (0,))]


@pytest.mark.parametrize("strict", [False, True])
def test_a_job_that_names_none_of_several_models_is_refused(registry: TestRegistry, strict: bool) -> None:
    registry.serve("other")
    job = _plan(registry, completion_line(), chat_line(custom_id="b"), strict=strict)
    assert (job.status, job.request_counts.total) == (JobState.FAILED, 0)
    message = "no model is named, and 2 are served; accepted: 'fake', 'other', in the lines or as --model"
    assert {(error.code, error.message, error.param) for error in job.errors} == {("model_not_found", message, "model")}
    assert job.error is not None
    assert message in job.error


def test_the_lines_of_a_strict_file_are_for_one_model(registry: TestRegistry) -> None:
    job = _plan(
        registry, completion_line(), completion_line(model="later", custom_id="b"), known=["later"], strict=True
    )
    assert [(error.line, error.code, error.message) for error in job.errors] == [
        (2, "model_mismatch", "model is 'later'; accepted: 'fake', which lines before it are for")
    ]
    names = ["fake", "hub/fake"]
    job = _plan(registry, *(completion_line(model=name, custom_id=name) for name in names), strict=True)
    assert [(error.line, error.code, error.message) for error in job.errors] == [
        (2, "model_mismatch", "model is 'hub/fake'; accepted: 'fake', as a line before it has it")
    ]


def test_lines_that_only_one_model_serves_run_beside_ambiguous_ones(registry: TestRegistry) -> None:
    registry.directory("embedding-worker").announce(Announcement(name="embedder", endpoints=("/v1/embeddings",)))
    job = _plan(registry, batch_line("/v1/embeddings", {"input": "a"}, custom_id="a"), completion_line())
    assert (job.status, _codes(registry, job.id)) == (JobState.IN_PROGRESS, {1: "model_not_found"})
    assert _models(registry, job) == [("fake", (1,))]


def test_among_lines_with_models_one_that_names_none_fails_alone(registry: TestRegistry) -> None:
    registry.serve("other")
    job = _plan(registry, completion_line(), completion_line(model="other", custom_id="b"))
    assert (job.status, job.request_counts.failed) == (JobState.IN_PROGRESS, 1)
    assert _codes(registry, job.id) == {1: "model_not_found"}
    assert _models(registry, job) == [("other", (1,))]


def test_a_name_that_means_no_model_fails_its_line(registry: TestRegistry) -> None:
    registry.serve("other", aliases=["gpt-4o-mini"])
    job = _plan(registry, completion_line(model="gpt-4"), completion_line(model="gpt-4o-mini", custom_id="b"))
    assert _codes(registry, job.id) == {1: "model_not_found"}
    accepted = "model is 'gpt-4'; accepted: 'fake', 'other', 'gpt-4o-mini', or a name in limits.models, to wait for it"
    assert accepted in registry.records(job.id)[0].decode()
    assert _models(registry, job) == [("other", (1,))]


def test_a_model_that_nobody_serves_yet_is_waited_for(registry: TestRegistry) -> None:
    job = _plan(registry, completion_line(model="later"), completion_line(custom_id="b"), known=["later"])
    assert (job.status, job.waiting_for) == (JobState.IN_PROGRESS, ("later",))
    registry.serve("later")
    assert registry.status(job.id).waiting_for == ()
    assert _models(registry, job) == [("fake", (1,)), ("later", (0,))]


def test_the_model_of_a_job_is_that_of_lines_that_name_none(registry: TestRegistry) -> None:
    registry.serve("other")
    lines = [completion_line(), completion_line(model="hub/other", custom_id="b")]
    job = _plan(registry, *lines, completion_line(model="fake", custom_id="c"), model="other")
    assert (job.model, _codes(registry, job.id)) == ("other", {3: "model_mismatch"})
    assert _models(registry, job) == [("other", (0, 1))]


def test_a_refused_job_has_no_record_of_its_bad_lines(registry: TestRegistry) -> None:
    registry.serve("other")
    job = _plan(registry, *[b"{bad"] * 5, completion_line())
    assert (job.status, job.request_counts.total) == (JobState.FAILED, 0)


def test_a_job_cancelled_as_its_model_is_refused_is_closed(registry: TestRegistry) -> None:
    job_id = registry.submit([completion_line()], SubmitOptions(model="gpt-4"))
    with running_units(registry) as units:
        held = units.hold(UnitRef.plan(job_id))
        registry.control.cancel(job_id)
        units.planner().plan(held)
    assert registry.status(job_id).status is JobState.CANCELLED


def test_a_plan_waits_until_a_redis_that_forgot_is_told_again(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.registry.models.SETTLE_S", 2.0)  # 12 s of nothing otherwise
    job_id = registry.submit([completion_line(model="other")])
    with running_units(registry) as units:
        planner, held = units.planner(), units.hold(UnitRef.plan(job_id))
        units.directory.announce(Announcement(name="fake"))
        registry.redis.delete(registry.keys.served, registry.keys.known_models)
        with running_thread(lambda _: planner.plan(held)):
            wait_until(lambda: registry.redis.hexists(registry.keys.served, "tester"))
            registry.serve("other")
            wait_until(lambda: units.announcer.announced)
        assert units.announcer.models == ["other"]


def test_a_job_for_a_model_that_is_none_is_refused(registry: TestRegistry) -> None:
    job = _plan(registry, completion_line(), model="gpt-4")
    assert (job.status, job.model) == (JobState.FAILED, "gpt-4")
    message = "the job's model is 'gpt-4'; accepted: 'fake', or a name in limits.models, to wait for it"
    assert [(error.code, error.message) for error in job.errors] == [("model_not_found", message)]


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
    assert (job.status, job.request_counts.failed, job.errors) == (JobState.IN_PROGRESS, 2, ())
    assert (job.endpoint, job.model) == (COMPLETIONS, "fake")


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


def _error(code: str, index: int = 0, message: str = "bad", param: str = "url") -> LineError:
    return LineError(message, code=code, index=index, param=param)


def test_nothing_bad_is_no_refusal() -> None:
    assert not FileRefusal(3)


@pytest.mark.parametrize(
    ("of_line", "of_file"),
    [
        *((code, code) for code in ("invalid_json_line", "duplicate_custom_id", "url_mismatch", "model_mismatch")),
        ("unknown_url", "url_mismatch"), ("missing_parameter", "invalid_request"), ("line_too_long", "invalid_request"),
    ],
)  # fmt: skip
def test_a_line_has_the_code_that_a_file_is_refused_with(of_line: str, of_file: str) -> None:
    refusal = FileRefusal(3)
    refusal.add(_error(of_line, index=1))
    (error,) = refusal.errors
    assert (error.code, error.line, error.message, error.param) == (of_file, 2, "bad", "url")


def test_all_bad_lines_are_counted_and_the_first_hundred_kept() -> None:
    refusal = FileRefusal(1000)
    for index in range(1, 501):
        refusal.add(_error("invalid_json_line", index, message="x" * 10_000, param="p" * 10_000))
    assert [error.line for error in refusal.errors] == list(range(2, MAX_ERRORS + 2))
    assert all(len(error.message) <= 400 for error in refusal.errors)
    assert all(error.param == "p" * 200 for error in refusal.errors)
    assert refusal.reason.startswith("500 of the file's 1000 lines are bad; line 2: xxx")
