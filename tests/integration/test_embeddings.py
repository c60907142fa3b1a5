"""Embeddings by the command line and through the queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from engine.text.tokenizer import Tokenizer
from tests.support.request_lines import error_body, essence, read_records
from tests.support.tiny_checkpoint import ReferenceEmbedder, make_bert_checkpoint, write_pooling
from tests.support.workers import ONE_THREAD, running_workers
from worker.cli.run import run
from worker.client import BatchClient

TOLERANCE = 1e-4
SHARED = "You are the assistant and the user is you. " * 3
NUM_LINES = 24


def _line(custom_id: str, url: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def _inputs(number: int) -> list[str]:
    return [f"{SHARED}Text {number}.", f"{number} alone"][: 1 + number % 2]


def _embedding_lines() -> list[bytes]:
    return [_line(f"e{number}", "/v1/embeddings", input=_inputs(number)) for number in range(NUM_LINES)]


def _generating_lines() -> list[bytes]:
    options: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    messages = [{"role": "user", "content": SHARED}]
    prompts = [_line(f"p{number}", "/v1/completions", prompt=_inputs(number)[0], **options) for number in range(4)]
    return [*prompts, _line("chat", "/v1/chat/completions", messages=messages, **options)]


def _check_embeddings(records: dict[str, dict[str, Any]], model: Path, reference: ReferenceEmbedder) -> None:
    tokenizer = Tokenizer.for_encoding(model)
    for number in range(NUM_LINES):
        record = records[f"e{number}"]
        assert error_body(record) is None, record
        body = record["response"]["body"]
        inputs = tokenizer.encode_batch(_inputs(number))
        assert body["usage"]["prompt_tokens"] == sum(map(len, inputs))
        for item, token_ids in zip(body["data"], inputs, strict=True):
            torch.testing.assert_close(
                torch.tensor(item["embedding"]), reference.embed(token_ids), atol=TOLERANCE, rtol=0
            )


def _run_offline(lines: list[bytes], model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """The records of `millrace run`, by custom_id."""
    requests, results = folder / "requests.jsonl", folder / "results.jsonl"
    requests.write_bytes(b"\n".join(lines) + b"\n")
    arguments = ["-i", str(requests), "-o", str(results), "--model", str(model), *ONE_THREAD]
    done = CliRunner().invoke(run, arguments)
    assert done.exit_code == 0, done.output
    return _by_custom_id(read_records(results))


def _by_custom_id(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {record["custom_id"]: record for record in records}
    assert len(found) == len(records)
    return found


def test_a_decoder_embeds_and_generates_in_one_job_offline_and_queued(
    redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    lines = [*_embedding_lines(), *_generating_lines()]
    offline = _run_offline(lines, tiny_model, tmp_path)
    with running_workers(redis_url, tiny_model, 1, "--set", "worker.shard_size=8"), BatchClient(redis_url) as client:
        job_id = client.submit(lines)
        status = client.wait(job_id, timeout_s=60.0)
        queued = _by_custom_id(list(client.results(job_id)))
    assert (status.request_counts.completed, status.request_counts.failed) == (len(lines), 0)
    reference = ReferenceEmbedder(tiny_model, "last_token")
    _check_embeddings(offline, tiny_model, reference)
    _check_embeddings(queued, tiny_model, reference)
    for name in ("p0", "p3", "chat"):
        assert essence(queued[name]) == essence(offline[name])


def test_an_encoder_embeds_and_answers_each_other_line_with_an_error(tmp_path: Path) -> None:
    model = make_bert_checkpoint(tmp_path / "bert", max_position_embeddings=256)
    write_pooling(model, "cls")
    lines = [*_embedding_lines(), *_generating_lines(), _line("long", "/v1/embeddings", input=SHARED * 9)]
    records = _run_offline(lines, model, tmp_path)
    assert len(records) == len(lines)
    _check_embeddings(records, model, ReferenceEmbedder(model, "cls"))
    for name in ("p0", "chat"):
        failure = error_body(records[name])
        assert failure is not None
        assert (failure["code"], failure["param"]) == ("unsupported_endpoint", "url")
    too_long = error_body(records["long"])
    assert too_long is not None
    assert (too_long["code"], too_long["param"]) == ("context_length_exceeded", "input")
