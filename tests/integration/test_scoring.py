"""Scores, rerankings and classes by the command line and through the queue, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from click.testing import CliRunner
from tokenizers import decoders, models, pre_tokenizers, processors

from engine.text.tokenizer import Tokenizer
from tests.support.request_lines import error_body, read_records
from tests.support.tiny_checkpoint import (
    ReferenceClassifier,
    ReferenceEmbedder,
    make_bert_checkpoint,
    make_classifying_decoder,
)
from tests.support.workers import ONE_THREAD, running_workers
from worker.cli.run import run
from worker.client import BatchClient

TOLERANCE = 1e-4
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
QUERY = "where does the water go"
DOCUMENTS = ["to the mill", "a", "it goes over the wheel, and then on to the sea!", "nobody knows", "up 2 the hill"]


def _line(custom_id: str, url: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def _lines() -> list[bytes]:
    """Good lines of each kind, and bad ones among them: what the model does not serve, and what is too long."""
    pairs = [_line(f"s{number}", "/score", text_1=QUERY, text_2=DOCUMENTS[number:]) for number in range(5)]
    return [
        *pairs,
        _line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "a"}]),
        _line("rerank", "/v2/rerank", query=QUERY, documents=DOCUMENTS, top_n=3),
        _line("long", "/v1/score", text_1=QUERY, text_2=["a", "a " * 300]),
        _line("cut", "/v1/score", text_1=QUERY, text_2=["a", "a " * 300], truncate_prompt_tokens=60),
        _line("embed", "/v1/embeddings", input="a"),
        _line("classes", "/classify", input=DOCUMENTS, use_activation=False),
        _line("uneven", "/score", text_1=["a", "b", "c"], text_2=["a", "b"]),
    ]


def _offline(lines: list[bytes], model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """The records of `millrace run`, by custom_id."""
    requests, results = folder / "requests.jsonl", folder / "results.jsonl"
    requests.write_bytes(b"\n".join(lines) + b"\n")
    done = CliRunner().invoke(run, ["-i", str(requests), "-o", str(results), "--model", str(model), *ONE_THREAD])
    assert done.exit_code == 0, done.output
    records = read_records(results)
    return {record["custom_id"]: record for record in records}


def _make_encoder(path: Path, family: str, **options: Any) -> Path:
    """With a head of classes; RoBERTa's tokenizer puts two separators between the texts of a pair."""
    if family == "bert":
        return make_bert_checkpoint(path, head="classes", **options)
    pieces = [*ROBERTA_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    make_bert_checkpoint(path, head="classes", family="roberta", vocab_size=len(pieces), **options)
    bytes_alone = tokenizers.Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    bytes_alone.add_special_tokens(list(ROBERTA_SPECIAL))
    bytes_alone.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "cls_token": "<s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"sep_token": "</s>"}))
    return path


def _check(records: dict[str, dict[str, Any]], reference: ReferenceClassifier) -> None:
    def scores_of(documents: list[str], max_length: int | None = None) -> torch.Tensor:
        return torch.sigmoid(reference.logits_of_texts([QUERY] * len(documents), documents, max_length)[:, 0])

    def body(name: str) -> Any:
        assert error_body(records[name]) is None, records[name]
        return records[name]["response"]["body"]

    def found(name: str) -> torch.Tensor:
        return torch.tensor([item["score"] for item in body(name)["data"]])

    for number in range(5):
        torch.testing.assert_close(found(f"s{number}"), scores_of(DOCUMENTS[number:]), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found("cut"), scores_of(["a", "a " * 300], 60), atol=TOLERANCE, rtol=0)
    best = scores_of(DOCUMENTS).sort(descending=True)
    ranked = body("rerank")["results"]
    assert [item["index"] for item in ranked] == best.indices[:3].tolist()
    assert [item["document"]["text"] for item in ranked] == [DOCUMENTS[index] for index in best.indices[:3]]
    classes = torch.tensor([item["probs"] for item in body("classes")["data"]])
    torch.testing.assert_close(classes, reference.logits_of_texts(DOCUMENTS), atol=TOLERANCE, rtol=0)
    errors = {name: error_body(records[name]) for name in ("chat", "embed", "long", "uneven")}
    assert {name: error and (error["code"], error["param"]) for name, error in errors.items()} == {
        "chat": ("unsupported_endpoint", "url"),
        "embed": ("unsupported_endpoint", "url"),
        "long": ("context_length_exceeded", "text_2[1]"),
        "uneven": ("invalid_value", "text_1"),
    }


@pytest.mark.parametrize("family", ["bert", "roberta", "qwen3"])
def test_a_cross_encoder_scores_pairs_offline_and_through_the_queue(
    redis_url: str, tmp_path: Path, family: str
) -> None:
    model = tmp_path / "model"
    options: dict[str, Any] = {"num_labels": 1, "max_position_embeddings": 256}
    if family == "qwen3":
        make_classifying_decoder(model, **options)
    else:
        _make_encoder(model, family, **options)
    lines, reference = _lines(), ReferenceClassifier(model)
    _check(_offline(lines, model, tmp_path), reference)
    if family != "bert":
        return
    with running_workers(redis_url, model, 1, "--set", "worker.shard_size=4"), BatchClient(redis_url) as client:
        job_id = client.submit(lines)
        status = client.wait(job_id, timeout_s=60.0)
        queued = {record["custom_id"]: record for record in client.results(job_id)}
    assert (status.request_counts.completed, status.request_counts.failed) == (len(lines) - 4, 4)
    _check(queued, reference)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_classes_of_a_text_are_a_softmax_unless_asked_otherwise(tmp_path: Path, family: str) -> None:
    model = _make_encoder(tmp_path / "model", family, num_labels=3)
    lines = [
        _line("left out", "/classify", input=DOCUMENTS),
        _line("logits", "/classify", input=DOCUMENTS[0], use_activation=False),
    ]
    records = _offline(lines, model, tmp_path)
    logits = ReferenceClassifier(model).logits_of_texts(DOCUMENTS)
    for name, expected in (("left out", logits.softmax(-1)), ("logits", logits[:1])):
        data = records[name]["response"]["body"]["data"]
        found = torch.tensor([item["probs"] for item in data])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        assert [item["label"] for item in data] == [f"LABEL_{index}" for index in expected.argmax(-1).tolist()]
        assert {item["num_classes"] for item in data} == {3}


def test_a_model_for_embeddings_scores_pairs_by_their_cosine(tmp_path: Path) -> None:
    model = make_bert_checkpoint(tmp_path / "model", max_position_embeddings=256)
    lines = [
        _line("score", "/v1/score", text_1=QUERY, text_2=DOCUMENTS),
        _line("each", "/v1/score", text_1=DOCUMENTS[1:], text_2=DOCUMENTS[:-1]),
        _line("classes", "/classify", input="a"),
    ]
    records = _offline(lines, model, tmp_path)
    reference, tokenizer = ReferenceEmbedder(model, "mean"), Tokenizer.for_encoding(model)
    query, *documents = (reference.embed(ids) for ids in tokenizer.encode_batch([QUERY, *DOCUMENTS]))
    for name, expected in (
        ("score", [query @ document for document in documents]),
        ("each", [first @ second for first, second in zip(documents[1:], documents[:-1], strict=True)]),
    ):
        found = [item["score"] for item in records[name]["response"]["body"]["data"]]
        torch.testing.assert_close(torch.tensor(found), torch.stack(expected), atol=TOLERANCE, rtol=0)
    failure = error_body(records["classes"])
    assert failure is not None
    assert (failure["code"], failure["param"]) == ("unsupported_endpoint", "url")
