"""Lines for scores, rerankings and classes: what they may hold, the engine requests made of them, and their records.

Records are read by vLLM's response models, typed in from vllm/entrypoints/pooling (scoring and classify) as of 2026.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import AutoTokenizer

from engine.checkpoint.classifier_config import ClassActivation, ClassifierConfig
from engine.errors import CheckpointError, InvalidRequest, PromptTooLong
from engine.request import ClassificationRequest, EmbeddingRequest, RequestOutput
from engine.text.tokenizer import Tokenizer
from settings import LimitSettings
from tests.support.fake_engine import served_model
from tests.support.request_lines import batch_line, build_request, chat_line, error_of, parse, raw_line
from tests.support.tiny_checkpoint import make_word_piece_tokenizer
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line
from worker.lines.request_line import Endpoint
from worker.records.record import encode_record
from worker.requests import pooled
from worker.requests.served_model import ServedModel
from worker.requests.step_engine import served_endpoints

SCORE, RERANK, CLASSIFY = Endpoint.SCORE, Endpoint.RERANK, Endpoint.CLASSIFY
SCORING = ClassifierConfig(("LABEL_0",), "sigmoid", "none")
CLASSES = ClassifierConfig(("no", "yes"), "softmax", "sigmoid")
PAIRS = {"text_1": "a", "text_2": ["b", "c"]}

BAD: list[tuple[str, Mapping[str, object], str, str]] = [
    (SCORE, {"text_1": "a"}, "invalid_value", "text_1"),
    (SCORE, {"text_1": "a", "documents": ["b"]}, "invalid_value", "text_1"),
    (SCORE, {**PAIRS, "items": "d"}, "invalid_value", "text_1"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "invalid_value", "text_1"),
    (SCORE, {"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "invalid_value", "queries"),
    (SCORE, {"text_1": "a", "text_2": []}, "empty_prompt", "text_2"),
    (SCORE, {"text_1": "a", "text_2": ["b", 3]}, "invalid_type", "text_2[1]"),
    (SCORE, {"text_1": {"content": []}, "text_2": "b"}, "invalid_type", "text_1"),
    (SCORE, {**PAIRS, "use_activation": 1}, "invalid_type", "use_activation"),
    (SCORE, {**PAIRS, "truncate_prompt_tokens": -2}, "invalid_value", "truncate_prompt_tokens"),
    (SCORE, {**PAIRS, "temperature": 0}, "unknown_parameter", "temperature"),
    (RERANK, {"query": "a"}, "missing_parameter", "documents"),
    (RERANK, {"query": ["a"], "documents": ["b"]}, "invalid_type", "query"),
    (RERANK, {"query": "a", "documents": [{"text": "b"}]}, "invalid_type", "documents[0]"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "invalid_value", "top_n"),
    (RERANK, {"query": "a", "documents": ["b"], "return_documents": True}, "unknown_parameter", "return_documents"),
    (CLASSIFY, {}, "missing_parameter", "input"),
    (CLASSIFY, {"input": []}, "empty_prompt", "input"),
    (CLASSIFY, {"input": "a", "dimensions": 3}, "unknown_parameter", "dimensions"),
    (CLASSIFY, {"messages": [{"role": "user", "content": "a"}]}, "url_mismatch", "url"),
    (SCORE, {"query": "a", "documents": ["b"]}, "url_mismatch", "url"),
    (RERANK, PAIRS, "url_mismatch", "url"),
]


class Strict(BaseModel):
    """A response must have these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Usage(Strict):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None
    prompt_tokens_details: dict[str, int] | None


class Score(Strict):
    index: int
    object: str
    score: float


class ScoreResponse(Strict):
    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RerankDocument(Strict):
    text: str | None
    multi_modal: None


class RerankResult(Strict):
    index: int
    document: RerankDocument
    relevance_score: float


class RerankUsage(Strict):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(Strict):
    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]


class Classification(Strict):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(Strict):
    id: str
    object: str
    created: int
    model: str
    data: list[Classification]
    usage: Usage


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_word_piece_tokenizer(tmp_path)
    return Tokenizer.for_encoding(tmp_path)


def served(tokenizer: Tokenizer, classifier: ClassifierConfig | None, **options: Any) -> ServedModel:
    return served_model(tokenizer, **{"max_model_len": 20, "generates": False} | options, classifier=classifier)


def response(model: ServedModel, raw: bytes, **vectors: Any) -> dict[str, Any]:
    """The body of the record of a line whose request ended in `vectors`, having gone through JSON."""
    output = RequestOutput("0", 9, 4, (), **vectors)
    record, _ = model.job("s0-1", created_s=1_700_000_000).of_output(parse(raw), output)
    body: dict[str, Any] = json.loads(encode_record(record))["response"]["body"]
    return body


@pytest.mark.parametrize(("url", "body", "code", "param"), BAD, ids=lambda value: str(value)[:50])
def test_a_bad_line_names_the_parameter(url: str, body: Mapping[str, object], code: str, param: str) -> None:
    error = error_of(batch_line(url, body))
    assert (error.code, error.param) == (code, param), error.message


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [("/score", SCORE), ("/v1/score", SCORE), ("/rerank", RERANK), ("/v1/rerank", RERANK), ("/v2/rerank", RERANK)],
)
def test_vllms_paths(path: str, endpoint: Endpoint) -> None:
    body = PAIRS if endpoint is SCORE else {"query": "a", "documents": ["b"]}
    assert parse(batch_line(path, body)).endpoint is endpoint


def test_a_body_alone_shows_what_it_is_for() -> None:
    assert parse(raw_line({"query": "a", "documents": ["b"]})).endpoint is RERANK
    assert parse(raw_line({"queries": "a", "documents": ["b"]})).endpoint is SCORE
    assert parse(raw_line(PAIRS)).endpoint is SCORE


def test_documents_of_a_chat_are_still_refused() -> None:
    assert error_of(chat_line(documents=["a"])).code == "unsupported_parameter"


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_one_is_held_against_each_and_several_one_by_one(tokenizer: Tokenizer, names: tuple[str, str]) -> None:
    builder = served(tokenizer, SCORING).requests
    for texts in (("a", ["b", "cc"]), (["a", "a"], ["b", "cc"])):
        line = parse(batch_line(SCORE, dict(zip(names, texts, strict=True))))
        expected = ClassificationRequest("r", [[2, 5, 3, 6, 3], [2, 5, 3, 7, 47, 3]], "none", [3, 3], tenant="t")
        assert build_request(builder, line, tenant="t") == expected


def test_a_reranking_holds_its_query_against_each_document(tokenizer: Tokenizer) -> None:
    line = parse(batch_line(RERANK, {"query": "a", "documents": ["b", ""], "use_activation": True}))
    expected = ClassificationRequest("r", [[2, 5, 3, 6, 3], [2, 5, 3, 3]], "none", [3, 3])
    assert build_request(served(tokenizer, SCORING).requests, line) == expected


def test_a_model_without_a_head_embeds_each_text_once(tokenizer: Tokenizer) -> None:
    builder = served(tokenizer, None).requests
    line = parse(batch_line(RERANK, {"query": "a", "documents": ["b", "c"]}))
    assert build_request(builder, line) == EmbeddingRequest("r", [[2, 5, 3], [2, 6, 3], [2, 7, 3]])
    with pytest.raises(
        InvalidRequest, match="use_activation is false; accepted: true: this model's scores are cosines"
    ):
        build_request(builder, parse(batch_line(SCORE, {**PAIRS, "use_activation": False})))


@pytest.mark.parametrize(("use_activation", "activation"), [(True, "softmax"), (False, "none"), (None, "softmax")])
def test_inputs_are_classified_as_texts_or_token_ids(
    tokenizer: Tokenizer, use_activation: bool | None, activation: ClassActivation
) -> None:
    for given, inputs in ((["a", "b"], [[2, 5, 3], [2, 6, 3]]), ([[5], [6, 7]], [(5,), (6, 7)])):
        line = parse(batch_line(CLASSIFY, {"input": given, "use_activation": use_activation}))
        assert build_request(served(tokenizer, CLASSES).requests, line) == ClassificationRequest(
            "r", inputs, activation
        )


def with_truncation_side(path: Path, side: str | None, direction: str) -> Tokenizer:
    """A tokenizer whose tokenizer_config.json says `side`, and tokenizer.json `direction`."""
    make_word_piece_tokenizer(path)
    library = LibraryTokenizer.from_file(str(path / "tokenizer.json"))
    library.enable_truncation(16, direction=direction)
    library.save(str(path / "tokenizer.json"))
    file = path / "tokenizer_config.json"
    added = {} if side is None else {"truncation_side": side}
    file.write_text(json.dumps(json.loads(file.read_text()) | added))
    return Tokenizer.for_encoding(path)


@pytest.mark.parametrize(("side", "direction"), [(None, "right"), ("left", "right"), (None, "left"), ("right", "left")])
def test_texts_are_cut_as_transformers_cuts_them(tmp_path: Path, side: str | None, direction: str) -> None:
    tokenizer, theirs = with_truncation_side(tmp_path, side, direction), AutoTokenizer.from_pretrained(tmp_path)
    builder = served(tokenizer, SCORING).requests
    texts = ["", "a", "a b c", "a b c d e f g h i j k l m", "a " * 40]
    for limit in (4, 5, 9, 10, 20):
        for first in texts:
            line = parse(batch_line(SCORE, {"text_1": first, "text_2": texts, "truncate_prompt_tokens": limit}))
            request = build_request(builder, line)
            wanted = theirs([first] * len(texts), texts, truncation=True, max_length=limit, padding=False)
            assert isinstance(request, ClassificationRequest)
            assert request.inputs == wanted["input_ids"]
            types = [row.index(1) if 1 in row else len(row) for row in wanted["token_type_ids"]]
            assert request.second_starts == types
    line = parse(batch_line(CLASSIFY, {"input": [7, 8, 9], "truncate_prompt_tokens": 2}))
    request = build_request(builder, line)
    assert isinstance(request, ClassificationRequest)
    assert list(request.inputs[0]) == ([8, 9] if theirs.truncation_side == "left" else [7, 8])


def test_an_unknown_end_to_cut_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="truncation_side is 'middle'; accepted: left or right"):
        with_truncation_side(tmp_path, "middle", "right")


@pytest.mark.parametrize("url", [Endpoint.EMBEDDINGS, CLASSIFY])
def test_a_single_input_is_cut_to_the_context_or_to_a_number(tokenizer: Tokenizer, url: Endpoint) -> None:
    builder = served(tokenizer, CLASSES if url is CLASSIFY else None).requests
    for limit, length in ((-1, 20), (5, 5)):
        for given in ("a " * 30, [7] * 30):
            request = build_request(builder, parse(batch_line(url, {"input": given, "truncate_prompt_tokens": limit})))
            assert isinstance(request, ClassificationRequest | EmbeddingRequest)
            assert list(map(len, request.inputs)) == [length]


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (21, "truncate_prompt_tokens is 21; accepted: at most the context, 20, or -1"),
        (3, "truncate_prompt_tokens is 3; accepted: more than the 3 special tokens around it"),
    ],
)
def test_a_cut_that_cannot_be_made_is_refused(tokenizer: Tokenizer, limit: int, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(
            served(tokenizer, SCORING).requests, parse(batch_line(SCORE, {**PAIRS, "truncate_prompt_tokens": limit}))
        )
    assert (str(caught.value), caught.value.param) == (said, "truncate_prompt_tokens")


def test_a_text_that_is_too_long_is_named(tokenizer: Tokenizer) -> None:
    long = "a " * 18
    for classifier, body, param in (
        (SCORING, {"text_1": "a", "text_2": ["b", long]}, "text_2[1]"),
        (SCORING, {"text_1": long, "text_2": "b"}, "text_2"),
        (None, {"text_1": long + "a", "text_2": "b"}, "text_1"),
        (None, {"queries": "a", "documents": ["b", long + "a"]}, "documents[1]"),
    ):
        with pytest.raises(PromptTooLong) as caught:
            build_request(served(tokenizer, classifier).requests, parse(batch_line(SCORE, body)))
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("generates", "compares", "classifier", "served_", "others"),
    [
        (True, True, None, [*Endpoint][:6], [CLASSIFY]),
        (True, False, None, [*Endpoint][:4], [SCORE, RERANK, CLASSIFY]),
        (False, True, None, [Endpoint.EMBEDDINGS, SCORE, RERANK], [Endpoint.COMPLETIONS, CLASSIFY]),
        (False, False, SCORING, [SCORE, RERANK, CLASSIFY], [Endpoint.EMBEDDINGS, Endpoint.CHAT_COMPLETIONS]),
        (False, True, CLASSES, [CLASSIFY], [Endpoint.EMBEDDINGS, Endpoint.COMPLETIONS, SCORE, RERANK]),
    ],
)
def test_a_model_refuses_the_endpoints_that_it_does_not_serve(
    tokenizer: Tokenizer,
    generates: bool,
    compares: bool,
    classifier: ClassifierConfig | None,
    served_: list[Endpoint],
    others: list[Endpoint],
) -> None:
    bodies: dict[Endpoint, Mapping[str, object]] = {
        Endpoint.CHAT_COMPLETIONS: {"messages": [{"role": "user", "content": "a"}]},
        Endpoint.RESPONSES: {"input": "a"},
        Endpoint.COMPLETIONS: {"prompt": "a"},
        Endpoint.EMBEDDINGS: {"input": "a"},
        SCORE: PAIRS,
        RERANK: {"query": "a", "documents": ["b"]},
        CLASSIFY: {"input": "a"},
    }
    assert list(served_endpoints(generates=generates, compares=compares, classifier=classifier)) == served_
    builder = served(tokenizer, classifier, generates=generates, compares=compares).requests
    for endpoint in set(served_) - {Endpoint.CHAT_COMPLETIONS, Endpoint.RESPONSES}:
        build_request(builder, parse(batch_line(endpoint, bodies[endpoint])))
    for endpoint in others:
        with pytest.raises(InvalidRequest, match=f"does not serve {endpoint}") as caught:
            build_request(builder, parse(batch_line(endpoint, bodies[endpoint])))
        assert str(caught.value).endswith(f"accepted: url {' or '.join(served_)}")
        assert (caught.value.code, caught.value.param) == ("unsupported_endpoint", "url")


def test_the_operator_limits_the_pairs_of_a_line() -> None:
    limits = LimitSettings(max_embedding_inputs=2)
    for name, body in (("documents", {"query": "a"}), ("text_2", {"text_1": "a"})):
        parse_request_line(raw_line({**body, name: ["b"] * 2}), 0, limits)
        with pytest.raises(
            LineError, match=rf"{name} has 3 entries; accepted: at most 2 \(limits.max_embedding_inputs\)"
        ):
            parse_request_line(raw_line({**body, name: ["b"] * 3}), 0, limits)


def test_the_operator_limits_what_a_line_repeats() -> None:
    documents = ["b"] * 2048
    raw = raw_line({"query": "a" * 200_000, "documents": documents})
    with pytest.raises(LineError) as caught:
        parse_request_line(raw, 0, LimitSettings())
    said = "documents makes pairs of 409602048 characters together; accepted: at most 1048576 (4 times "
    assert caught.value.message == f"{said}limits.max_prompt_bytes)"
    assert (caught.value.code, caught.value.param) == ("invalid_value", "documents")
    parse_request_line(raw_line({"query": "a" * 511, "documents": documents}), 0, LimitSettings())
    assert error_of(raw_line({"query": "a" * 512, "documents": documents})).param == "documents"
    one_by_one = {"text_1": ["a" * 60] * 2000, "text_2": ["b" * 50] * 2000}
    parse_request_line(raw_line(one_by_one), 0, LimitSettings())


def test_slices_of_a_read_are_tokenised_as_the_whole(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [{"query": "a b " * number, "documents": ["c " * 9, "", "d"]} for number in range(7)]
    lines = [(parse(batch_line(RERANK, {**body, "truncate_prompt_tokens": 9})), "r") for body in bodies]
    builder, sizes = served(tokenizer, SCORING).requests, []
    whole = builder.build_all(lines, created_s=0, tenant="", priority=0)
    encode = tokenizer.encode_inputs

    def counted(texts: Any, limits: Any) -> Any:
        sizes.append((len(texts), sum(len(part) for pair in texts for part in pair)))
        return encode(texts, limits)

    monkeypatch.setattr(tokenizer, "encode_inputs", counted)
    monkeypatch.setattr(pooled, "SLICE_CHARACTERS", 30)
    assert builder.build_all(lines, created_s=0, tenant="", priority=0) == whole
    assert sum(count for count, _ in sizes) == 21
    assert 3 < len(sizes) < 21
    assert all(size <= 30 or count == 1 for count, size in sizes)


def test_a_text_that_cannot_be_cut_costs_those_beside_it_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (parse(batch_line(SCORE, {**PAIRS, "truncate_prompt_tokens": limit})) for limit in (5, 3))
    builder, calls, encode = served(tokenizer, SCORING).requests, [], tokenizer.encode_inputs

    def counted(texts: Any, limits: Any) -> Any:
        calls.append(len(texts))
        return encode(texts, limits)

    monkeypatch.setattr(tokenizer, "encode_inputs", counted)
    found = builder.build_all([(good, "r"), (bad, "s"), (good, "t")], created_s=0, tenant="", priority=0)
    assert calls == [6]
    assert isinstance(found[1], InvalidRequest)
    assert [type(request) for request in (found[0], found[2])] == [ClassificationRequest] * 2


def test_the_first_pair_orders_a_line() -> None:
    keys = [parse(raw_line({"query": "a b", "documents": [text]})).prompt_key() for text in "yx"]
    assert keys[0].startswith(parse(raw_line({"prompt": "a b"})).prompt_key())
    assert keys[1] < keys[0]


def test_a_score_is_vllms_response(tokenizer: Tokenizer) -> None:
    scores = (array("f", [0.75]), array("f", [-3.1]))
    body = response(served(tokenizer, SCORING), batch_line(SCORE, PAIRS), class_scores=scores)
    found = ScoreResponse.model_validate(body)
    assert [(item.index, item.object, item.score) for item in found.data] == [
        (0, "score", 0.75),
        (1, "score", -3.0999999),
    ]
    assert (found.id, found.object, found.model, found.created) == ("score-s0-1-0", "list", "m", 1_700_000_000)
    assert found.usage == Usage(
        prompt_tokens=9, total_tokens=9, completion_tokens=0, prompt_tokens_details={"cached_tokens": 4}
    )


def test_a_score_by_embeddings_is_their_cosine(tokenizer: Tokenizer) -> None:
    model, vectors = served(tokenizer, None), tuple(array("f", v) for v in ((1, 0), (0.6, 0.8), (0, -1), (0, 1)))
    one = response(model, batch_line(SCORE, {"text_1": "a", "text_2": ["b", "c", "d"]}), embeddings=vectors)
    assert [item["score"] for item in one["data"]] == pytest.approx([0.6, 0, 0], abs=1e-6)
    several = response(model, batch_line(SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d"]}), embeddings=vectors)
    assert [item["score"] for item in several["data"]] == pytest.approx([0, 0.8], abs=1e-6)


@pytest.mark.parametrize(("top_n", "order"), [(None, [2, 1, 3, 0]), (0, [2, 1, 3, 0]), (2, [2, 1]), (9, [2, 1, 3, 0])])
def test_a_reranking_is_vllms_response_best_first(tokenizer: Tokenizer, top_n: int | None, order: list[int]) -> None:
    scores = tuple(array("f", [score]) for score in (-1, 0.5, 2, 0.5))
    line = batch_line(RERANK, {"query": "q", "documents": ["a", "b", "c", "d"], "top_n": top_n})
    found = RerankResponse.model_validate(response(served(tokenizer, SCORING), line, class_scores=scores))
    assert [item.index for item in found.results] == order
    assert [item.document.text for item in found.results] == ["abcd"[index] for index in order]
    assert [item.relevance_score for item in found.results] == [scores[index][0] for index in order]
    assert (found.id, found.model, found.usage.total_tokens) == ("rerank-s0-1-0", "m", 9)


def test_classes_are_vllms_response(tokenizer: Tokenizer) -> None:
    scores = (array("f", [0.25, 0.75]), array("f", [0.5, 0.5]))
    body = response(served(tokenizer, CLASSES), batch_line(CLASSIFY, {"input": ["a", "b"]}), class_scores=scores)
    found = ClassificationResponse.model_validate(body)
    assert [(item.index, item.label, item.probs, item.num_classes) for item in found.data] == [
        (0, "yes", [0.25, 0.75], 2),
        (1, "no", [0.5, 0.5], 2),
    ]
    assert (found.id, found.object, found.usage.prompt_tokens) == ("classify-s0-1-0", "list", 9)


def test_a_record_that_is_too_large_says_what_to_ask_less_of(tokenizer: Tokenizer) -> None:
    job = served(tokenizer, SCORING).job("s0-1", created_s=0)
    for url, body, param in (
        (RERANK, {"query": "a", "documents": ["b"]}, "documents"),
        (CLASSIFY, {"input": "a"}, "input"),
    ):
        record: Any = job.of_too_large(parse(batch_line(url, body)), 5000, 4096)
        error = record["response"]["body"]["error"]
        assert (error["param"], error["code"]) == (param, "record_too_large")
        assert error["message"].endswith("ask for fewer texts in a line")
