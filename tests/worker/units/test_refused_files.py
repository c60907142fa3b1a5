"""Azure's and OpenAI's refusals: a strict job's file as a whole, and the same line by line without `strict`."""

from __future__ import annotations

import json

import pytest

from settings import LimitSettings
from tests.support.fake_engine import FakeEngine
from tests.support.openai_batch import OpenAIBatch
from tests.support.registry import TestRegistry
from tests.support.request_lines import CHAT, COMPLETIONS, batch_line
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.units import running_units
from worker.client import BatchClient
from worker.registry.errors import EmptyJob, JobTooLarge
from worker.schemas import SubmitOptions

BODY = {"model": "fake", "prompt": "hello"}
CHAT_BODY = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


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
