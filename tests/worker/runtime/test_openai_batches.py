"""Batches as OpenAI and Azure document them: examples, refused files, batches that end early."""

from __future__ import annotations

import json

import pytest

from settings import LimitSettings
from tests.support.fake_engine import EMBEDDING, FakeEngine, answer
from tests.support.registry import OpenAIBatch, TestRegistry, Units, running_units
from tests.support.request_lines import CHAT, COMPLETIONS, batch_line, completion_line
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from worker.client import BatchClient
from worker.registry.errors import EmptyJob, JobTooLarge
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import RunMode
from worker.schemas import JobState, SubmitOptions

# platform.openai.com/docs/guides/batch, "Prepare your batch file".
CHAT_MODEL = "gpt-3.5-turbo-0125"
CHAT_LINES = (
    b'{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": '
    b'"gpt-3.5-turbo-0125", "messages": [{"role": "system", "content": "You are a helpful assistant."},{"role": '
    b'"user", "content": "Hello world!"}],"max_tokens": 1000}}',
    b'{"custom_id": "request-2", "method": "POST", "url": "/v1/chat/completions", "body": {"model": '
    b'"gpt-3.5-turbo-0125", "messages": [{"role": "system", "content": "You are an unhelpful assistant."},{"role": '
    b'"user", "content": "Hello world!"}],"max_tokens": 1000}}',
)
# The API reference's examples of these endpoints, as the body of a line.
COMPLETIONS_MODEL = "gpt-3.5-turbo-instruct"
COMPLETIONS_LINES = (
    b'{"custom_id": "request-1", "method": "POST", "url": "/v1/completions", "body": {"model": '
    b'"gpt-3.5-turbo-instruct", "prompt": "Say this is a test", "max_tokens": 7, "temperature": 0}}',
)
EMBEDDINGS_MODEL = "text-embedding-ada-002"
EMBEDDINGS_LINES = (
    b'{"custom_id": "request-1", "method": "POST", "url": "/v1/embeddings", "body": {"input": "The food was delicious '
    b'and the waiter...", "model": "text-embedding-ada-002", "encoding_format": "float"}}',
)

BODY = {"model": "fake", "prompt": "hello"}
CHAT_BODY = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}

REST = {"c", "d", "e"}
BATCH_TIMES = {
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"
}  # fmt: skip


def _run(registry: TestRegistry, model: str, *lines: bytes, **options: object) -> OpenAIBatch:
    job_id = registry.submit(lines, SubmitOptions.model_validate({"strict": True, **options}))
    with running_units(registry, FakeEngine(chat_template=CHAT_TEMPLATE), model=model) as units:
        units.run_job(job_id)
    return OpenAIBatch.read(registry, job_id)


def test_the_chat_example_is_answered_and_its_batch_is_openais(registry: TestRegistry) -> None:
    found = _run(registry, CHAT_MODEL, *CHAT_LINES, metadata={"description": "nightly eval job"}, deadline_s=86_400)

    assert found.output.keys() == {"request-1", "request-2"}
    answer = found.output["request-1"]
    assert (answer.object, answer.model) == ("chat.completion", CHAT_MODEL)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    batch = found.batch
    assert (batch.status, batch.endpoint, batch.model) == ("completed", "/v1/chat/completions", CHAT_MODEL)
    assert (batch.completion_window, batch.metadata) == ("24h", {"description": "nightly eval job"})
    assert (batch.output_file_id is not None, batch.error_file_id, batch.errors) == (True, None, None)
    assert batch.expires_at == batch.created_at + 86_400
    assert batch.in_progress_at is not None
    assert batch.created_at <= batch.in_progress_at <= (batch.finalizing_at or 0) == batch.completed_at
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(body.usage.prompt_tokens for body in found.output.values())
    assert batch.usage.output_tokens == sum(body.usage.completion_tokens for body in found.output.values())
    assert batch.usage.input_tokens_details.cached_tokens == 2  # one of each, by the fake engine


def test_the_completions_example_is_answered(registry: TestRegistry) -> None:
    found = _run(registry, COMPLETIONS_MODEL, *COMPLETIONS_LINES)

    assert found.output["request-1"].object == "text_completion"
    assert found.output["request-1"].model == COMPLETIONS_MODEL
    assert (found.batch.status, found.batch.endpoint) == ("completed", "/v1/completions")


def test_the_embeddings_example_is_answered(registry: TestRegistry) -> None:
    found = _run(registry, EMBEDDINGS_MODEL, *EMBEDDINGS_LINES)

    answer = found.output["request-1"]
    assert (answer.object, answer.model) == ("list", EMBEDDINGS_MODEL)
    assert answer.data[0].embedding == pytest.approx(EMBEDDING)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    assert (found.batch.status, found.batch.endpoint) == ("completed", "/v1/embeddings")


def test_a_refused_request_is_in_the_error_file_others_are_answered(registry: TestRegistry) -> None:
    bad = CHAT_LINES[1].replace(b'"max_tokens": 1000', b'"max_tokens": 0')
    found = _run(registry, CHAT_MODEL, CHAT_LINES[0], bad, strict=False)

    assert found.output.keys() == {"request-1"}
    error = found.errors["request-2"]
    assert (error.code, error.param) == ("invalid_value", "max_tokens")
    assert found.batch.status == "completed"
    assert None not in (found.batch.output_file_id, found.batch.error_file_id)
    assert found.batch.errors is None


def _line(number: int, **parts: object) -> bytes:
    """A good line, but for what `parts` replaces or, as None, leaves out."""
    line = {"custom_id": f"r{number}", "method": "POST", "url": COMPLETIONS, "body": BODY} | parts
    return json.dumps({key: value for key, value in line.items() if value is not None}).encode()


# What is bad about the second of three lines: the file's code, the line's code by default (None: it runs), param.
BAD_LINES = {
    "not JSON": (b'{"custom_id": "r2", "method"', "invalid_json_line", "invalid_json_line", None),
    "no object": (b'["r2"]', "invalid_json_line", "invalid_json_line", None),
    "a custom_id again": (_line(2, custom_id="r1"), "duplicate_custom_id", "duplicate_custom_id", "custom_id"),
    "another endpoint": (_line(2, url=CHAT, body=CHAT_BODY), "url_mismatch", None, "url"),
    "an endpoint that is not there": (_line(2, url="/v1/moderations"), "url_mismatch", "unknown_url", "url"),
    "another endpoint's body": (_line(2, body=CHAT_BODY), "url_mismatch", "url_mismatch", "url"),
    "another model": (_line(2, body=BODY | {"model": "org/fake"}), "model_mismatch", None, "model"),
    "no custom_id": (_line(2, custom_id=None), "invalid_request", "missing_parameter", "custom_id"),
    "no body": (_line(2, body=None), "invalid_request", "missing_parameter", "body"),
    "another method": (_line(2, method="GET"), "invalid_request", "invalid_value", "method"),
    "a parameter out of range": (
        _line(2, body=BODY | {"temperature": -1}), "invalid_request", "invalid_value", "temperature"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_LINES)
def test_one_bad_line_fails_a_strict_file(registry: TestRegistry, kind: str) -> None:
    bad, code, _, param = BAD_LINES[kind]
    job_id = registry.submit([_line(1), bad, _line(3)], SubmitOptions(strict=True))
    with running_units(registry) as units:
        units.run_job(job_id)
    found = OpenAIBatch.read(registry, job_id)
    assert found.batch.errors is not None
    assert [(error.code, error.line, error.param) for error in found.batch.errors.data or []] == [(code, 2, param)]
    assert (found.batch.status, found.batch.output_file_id, found.batch.error_file_id) == ("failed", None, None)
    assert found.batch.failed_at is not None
    assert found.batch.in_progress_at is None
    assert (found.output, found.errors) == ({}, {})


@pytest.mark.parametrize("kind", BAD_LINES)
def test_by_default_a_bad_line_fails_alone(registry: TestRegistry, kind: str) -> None:
    bad, _, code, _ = BAD_LINES[kind]
    job_id = registry.submit([_line(1), bad, _line(3)])
    with running_units(registry, FakeEngine(chat_template=CHAT_TEMPLATE)) as units:
        units.run_job(job_id)
    found = OpenAIBatch.read(registry, job_id)
    assert (found.batch.status, found.batch.errors) == ("completed", None)
    assert {"r1", "r3"} <= found.output.keys()
    assert [error.code for error in found.errors.values()] == ([code] if code else [])


def test_a_file_for_another_endpoint_is_refused(registry: TestRegistry) -> None:
    job_id = registry.submit([_line(1)], SubmitOptions.model_validate({"strict": True, "endpoint": CHAT}))
    with running_units(registry) as units:
        units.run_job(job_id)
    found = OpenAIBatch.read(registry, job_id)
    assert found.batch.errors is not None
    assert [(error.code, error.line) for error in found.batch.errors.data or []] == [("url_mismatch", 1)]
    assert found.batch.endpoint == CHAT


def test_a_file_for_a_model_that_is_not_served_is_refused(registry: TestRegistry) -> None:
    lines = [batch_line(COMPLETIONS, {"model": "gpt-4o", "prompt": "a"}, custom_id=name) for name in "ab"]
    job_id = registry.submit(lines, SubmitOptions(strict=True))
    with running_units(registry) as units:
        units.run_job(job_id)
    found = OpenAIBatch.read(registry, job_id)
    assert found.batch.errors is not None
    assert [(error.code, error.line) for error in found.batch.errors.data or []] == [
        ("model_not_found", 1),
        ("model_not_found", 2),
    ]


def test_an_empty_or_too_long_file_is_refused_before_there_is_a_job(redis_url: str) -> None:
    """Where the producer waits for the answer. One that does not is told by the job: test_staged_jobs."""
    with BatchClient(redis_url, limits=LimitSettings(max_prompts_per_job=2)) as client:
        with pytest.raises(EmptyJob) as empty:
            client.submit([b"\n"])
        with pytest.raises(JobTooLarge) as too_long:
            client.submit([_line(number) for number in range(3)])
        assert client.jobs() == []
    assert (empty.value.code, too_long.value.code) == ("empty_file", "too_many_tasks")


def _with_two_of_five_done(registry: TestRegistry, units: Units) -> str:
    """A job of three shards of which one ran."""
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
