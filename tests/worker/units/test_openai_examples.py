"""The lines of OpenAI's own documentation, unchanged, and what their answers parse as."""

from __future__ import annotations

import pytest

from tests.support.fake_engine import EMBEDDING, FakeEngine
from tests.support.openai_batch import OpenAIBatch
from tests.support.registry import TestRegistry
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.units import running_units
from worker.schemas import SubmitOptions

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


def _run(registry: TestRegistry, model: str, *lines: bytes, **options: object) -> OpenAIBatch:
    job_id = registry.submit(lines, SubmitOptions.model_validate({"strict": True, **options}))
    with running_units(registry, FakeEngine(chat_template=CHAT_TEMPLATE)) as units:
        units.model_name = model
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


def test_a_refused_request_is_in_the_error_file_and_the_others_are_answered(registry: TestRegistry) -> None:
    bad = CHAT_LINES[1].replace(b'"max_tokens": 1000', b'"max_tokens": 0')
    found = _run(registry, CHAT_MODEL, CHAT_LINES[0], bad, strict=False)

    assert found.output.keys() == {"request-1"}
    error = found.errors["request-2"]
    assert (error.code, error.param) == ("invalid_value", "max_tokens")
    assert found.batch.status == "completed"
    assert None not in (found.batch.output_file_id, found.batch.error_file_id)
    assert found.batch.errors is None
