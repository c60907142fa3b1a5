"""The `openai` package, unchanged but for base_url and api_key, against servers, real workers and one Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from openai import NotFoundError, OpenAI
from openai.types import Batch, FileObject, Model

from tests.support.http_servers import ENDED, HttpServer, chat_lines, ended_batch, records, serving
from tests.support.processes import wait_until
from tests.support.request_lines import batch_line
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.workers import WorkerProcesses

CHAT: Final = "/v1/chat/completions"
ENGINE = {"chat_template": CHAT_TEMPLATE}


@pytest.fixture
def server(redis_url: str) -> Iterator[HttpServer]:
    with serving(redis_url) as server:
        yield server


@pytest.fixture
def openai(server: HttpServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


def _create(client: OpenAI, data: bytes) -> Batch:
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"run": "nightly"}
    )


def test_upload_create_poll_download_list_and_delete(openai: OpenAI, workers: WorkerProcesses, tmp_path: Path) -> None:
    workers.start(engine=ENGINE, model__name="fake")
    wait_until(lambda: openai.models.list().data, timeout_s=60)
    [model] = openai.models.list().data
    assert (model.id, openai.models.retrieve("fake").id, type(model)) == ("fake", "fake", Model)

    path = tmp_path / "requests.jsonl"
    path.write_bytes(chat_lines("a", "b", "c"))
    with path.open("rb") as stream:
        file = openai.files.create(file=stream, purpose="batch")
    assert type(file) is FileObject
    assert (file.bytes, file.filename, file.purpose, file.status) == (
        path.stat().st_size, "requests.jsonl", "batch", "processed"
    )  # fmt: skip
    assert openai.files.retrieve(file.id) == file
    assert openai.files.content(file.id).read() == path.read_bytes()
    assert openai.files.list().data == [file]

    batch = openai.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"run": "nightly"}
    )
    assert (batch.input_file_id, batch.endpoint, batch.completion_window) == (file.id, CHAT, "24h")
    assert (batch.metadata, batch.output_file_id) == ({"run": "nightly"}, None)
    assert batch.status in ("validating", "in_progress", *ENDED)

    done = ended_batch(openai, batch.id)
    assert (done.status, done.error_file_id) == ("completed", None)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (3, 0)
    assert done.output_file_id is not None
    output = openai.files.content(done.output_file_id)
    found = {record["custom_id"]: record["response"]["body"] for record in records(output.read())}
    assert found.keys() == {"a", "b", "c"}
    assert all(body["object"] == "chat.completion" for body in found.values())
    assert output.response.headers["X-Incomplete"] == "false"
    about = openai.files.retrieve(done.output_file_id)
    assert (about.bytes, about.purpose) == (len(output.content), "batch_output")

    assert [listed.id for listed in openai.batches.list()] == [batch.id]
    assert openai.files.delete(file.id).deleted
    assert openai.files.delete(done.output_file_id).deleted
    for gone in (file.id, done.output_file_id):
        with pytest.raises(NotFoundError):
            openai.files.retrieve(gone)


def test_two_servers_on_one_redis_are_one(redis_url: str, workers: WorkerProcesses) -> None:
    workers.start(engine=ENGINE, model__name="fake")
    with serving(redis_url) as first, serving(redis_url) as second, first.openai() as here, second.openai() as there:
        file = here.files.create(file=("lines.jsonl", chat_lines("a", "b")), purpose="batch")
        batch = there.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        done = ended_batch(here, batch.id)
        assert done.output_file_id is not None
        assert here.files.content(done.output_file_id).read() == there.files.content(done.output_file_id).read()
        assert [listed.id for listed in here.batches.list()] == [listed.id for listed in there.batches.list()]


def test_a_cancelled_batch_has_an_error_for_each_line_without_an_answer(openai: OpenAI) -> None:
    batch = _create(openai, chat_lines("a", "b"))
    assert openai.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended_batch(openai, batch.id)
    assert (done.status, done.output_file_id) == ("cancelled", None)
    assert done.error_file_id is not None
    errors = {
        record["custom_id"]: record["error"]["code"]
        for record in records(openai.files.content(done.error_file_id).read())
    }
    assert errors == dict.fromkeys("ab", "batch_cancelled")
    assert openai.batches.cancel(batch.id).status == "cancelled"


def test_one_bad_line_fails_the_batch_as_openai_has_it(openai: OpenAI, workers: WorkerProcesses) -> None:
    workers.start(engine=ENGINE, model__name="fake")
    bad = batch_line(
        CHAT, {"model": "fake", "messages": [{"role": "user", "content": "a"}], "temprature": 1}, custom_id="b"
    )
    batch = ended_batch(openai, _create(openai, chat_lines("a") + bad).id)
    assert batch.errors is not None
    assert [(error.line, error.param) for error in batch.errors.data or []] == [(2, "temprature")]
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)


def test_pages_of_batches_hold_each_batch_once(openai: OpenAI) -> None:
    ids = [_create(openai, chat_lines("a")).id for _ in range(5)]
    first = openai.batches.list(limit=2)
    assert ([batch.id for batch in first.data], first.has_more) == (ids[:2:-1], True)
    assert [batch.id for batch in openai.batches.list(limit=2)] == ids[::-1]  # the client asks for the pages


def test_answers_are_downloaded_while_the_batch_runs(openai: OpenAI, workers: WorkerProcesses, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    workers.start(engine={**ENGINE, "gate": str(gate), "answers_before_gate": 3}, model__name="fake")
    batch = _create(openai, chat_lines(*map(str, range(20))))
    file_id = f"file-{batch.id}-output"
    ended_batch(openai, batch.id, lambda batch: batch.request_counts and batch.request_counts.completed == 3)
    early = openai.files.content(file_id)
    assert openai.files.retrieve(file_id).bytes == len(early.read())
    gate.touch()
    done = ended_batch(openai, batch.id)
    whole = openai.files.content(file_id)

    assert (early.response.headers["X-Incomplete"], early.response.headers["X-Last-Line"]) == ("true", "3")
    assert len(records(early.content)) == 3
    assert done.output_file_id == file_id
    assert whole.read().startswith(early.content)
    assert (whole.response.headers["X-Incomplete"], whole.response.headers["X-Last-Line"]) == ("false", "20")
