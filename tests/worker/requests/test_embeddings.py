"""What a line for embeddings may hold, and the engine requests made from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import InvalidRequest, PromptTooLong
from engine.request import EmbeddingRequest, Request
from engine.text.tokenizer import Tokenizer
from settings import LimitSettings
from tests.support.fake_engine import served_model
from tests.support.request_lines import batch_line, build_request, chat_line, completion_line, error_of, parse, raw_line
from tests.support.tiny_checkpoint import make_word_piece_tokenizer
from worker.lines.bodies import EmbeddingBody
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line
from worker.lines.request_line import Endpoint
from worker.requests.builder import RequestBuilder

EMBEDDINGS = "/v1/embeddings"

BAD: list[tuple[dict[str, object], str, str]] = [
    ({"input": ""}, "empty_prompt", "input"),
    ({"input": []}, "empty_prompt", "input"),
    ({"input": ["a", ""]}, "empty_prompt", "input[1]"),
    ({"input": [[1], []]}, "empty_prompt", "input[1]"),
    ({"input": ["a", 1]}, "invalid_type", "input[1]"),
    ({"input": [1, "a"]}, "invalid_type", "input[1]"),
    ({"input": [1, True]}, "invalid_type", "input[1]"),
    ({"input": [[1], [2, 0.5]]}, "invalid_type", "input[1]"),
    ({"input": [1, -1]}, "invalid_value", "input[1]"),
    ({"input": [[2**31]]}, "invalid_value", "input[0]"),
    ({"input": {"text": "a"}}, "invalid_type", "input"),
    ({"input": [{"text": "a"}]}, "invalid_type", "input[0]"),
    ({"input": 3}, "invalid_type", "input"),
    ({"encoding_format": "int8"}, "invalid_value", "encoding_format"),
    ({"dimensions": 0}, "invalid_value", "dimensions"),
    ({"dimensions": "8"}, "invalid_type", "dimensions"),
    ({"temperature": 0}, "unknown_parameter", "temperature"),
    ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
]


@pytest.fixture
def builder(tmp_path: Path) -> RequestBuilder:
    make_word_piece_tokenizer(tmp_path)
    return served_model(Tokenizer.for_encoding(tmp_path), max_model_len=20).requests


def test_texts_get_the_special_tokens_and_token_ids_are_taken_as_they_are(builder: RequestBuilder) -> None:
    texts = build_request(builder, parse(raw_line({"input": ["a", "bb"], "dimensions": 8})), tenant="t")
    assert texts == EmbeddingRequest("r", [[2, 5, 3], [2, 6, 46, 3]], 8, tenant="t")
    ids = build_request(builder, parse(raw_line({"input": [[5], [6, 46]]})))
    assert ids == EmbeddingRequest("r", [(5,), (6, 46)])


def test_lines_of_all_kinds_are_built_together_each_in_its_place(builder: RequestBuilder) -> None:
    raws = [{"input": "a"}, {"prompt": "b"}, {"input": ["c", "d"]}, {"input": "e", "model": "x"}, {"input": [5]}]
    built = builder.build_all([(parse(raw_line(raw)), f"r{index}") for index, raw in enumerate(raws)], created_s=0)
    assert [type(item) for item in built] == [
        EmbeddingRequest, Request, EmbeddingRequest, InvalidRequest, EmbeddingRequest
    ]  # fmt: skip
    assert built[2] == EmbeddingRequest("r2", [[2, 7, 3], [2, 8, 3]])


def test_an_input_that_is_too_long_is_named(builder: RequestBuilder) -> None:
    assert isinstance(build_request(builder, parse(raw_line({"input": "a" * 18}))), EmbeddingRequest)
    for body, param in (({"input": "a" * 19}, "input"), ({"input": ["a", "b" * 30]}, "input[1]")):
        with pytest.raises(PromptTooLong) as caught:
            build_request(builder, parse(raw_line(body)))
        assert caught.value.param == param


@pytest.mark.parametrize("raw", [chat_line(), completion_line()])
def test_a_model_that_generates_nothing_refuses_other_endpoints(tmp_path: Path, raw: bytes) -> None:
    make_word_piece_tokenizer(tmp_path)
    tokenizer = Tokenizer.for_encoding(tmp_path)
    builder = served_model(tokenizer, max_model_len=20, generates=False).requests
    with pytest.raises(InvalidRequest, match="accepted: url /v1/embeddings") as caught:
        build_request(builder, parse(raw))
    assert (caught.value.code, caught.value.param) == ("unsupported_endpoint", "url")


def _body(**parameters: object) -> EmbeddingBody:
    body = parse(raw_line({"input": "hello", **parameters})).body
    assert isinstance(body, EmbeddingBody)
    return body


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("hello", ("hello",)),
        (["a", "b"], ("a", "b")),
        ([3, 1, 2], ((3, 1, 2),)),
        ([[3, 1], [2]], ((3, 1), (2,))),
    ],
)
def test_openais_four_shapes_of_input(given: object, inputs: object) -> None:
    assert _body(input=given).input == inputs


def test_an_openai_batch_line_is_understood() -> None:
    line = parse(batch_line(EMBEDDINGS, {"model": "m", "input": "hello", "encoding_format": "base64", "user": "u"}))
    assert (line.endpoint, line.custom_id) == (Endpoint.EMBEDDINGS, "a")


def test_what_says_nothing_about_the_answer_is_accepted() -> None:
    _body(user="u", metadata={"a": "b"}, safety_identifier="s", encoding_format="float", dimensions=None)


@pytest.mark.parametrize(("parameters", "code", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_line_names_the_parameter(parameters: dict[str, object], code: str, param: str) -> None:
    error = error_of(batch_line(EMBEDDINGS, {"input": "hello"} | parameters))
    assert (error.code, error.param) == (code, param), error.message


def test_input_belongs_to_embeddings_and_prompt_does_not() -> None:
    for url, body in (("/v1/completions", {"input": "a"}), (EMBEDDINGS, {"prompt": "a", "input": "a"})):
        error = error_of(batch_line(url, body))
        assert (error.code, error.param) == ("url_mismatch", "url")
    assert error_of(batch_line(EMBEDDINGS, {})).code == "missing_parameter"
    assert error_of(raw_line({"input": "a", "prompt": "a"})).code == "invalid_value"


def test_the_operator_limits_the_inputs_of_a_line() -> None:
    raw = raw_line({"input": ["a"] * 2049})
    assert error_of(raw).param == "input"
    parse_request_line(raw, 0, LimitSettings(max_embedding_inputs=2049))
    with pytest.raises(LineError, match=r"accepted: at most 1 \(limits.max_embedding_inputs\)"):
        parse_request_line(raw_line({"input": ["a", "b"]}), 0, LimitSettings(max_embedding_inputs=1))


def test_the_first_input_orders_a_line_among_completions() -> None:
    assert parse(raw_line({"input": ["ab", "c"]})).prompt_key() == parse(raw_line({"prompt": "ab"})).prompt_key()
    assert parse(raw_line({"input": [[5]]})).prompt_key() == parse(raw_line({"prompt": [5]})).prompt_key()


@pytest.mark.parametrize("value", [True, 0.5, "a", None, -1, 2**31])
def test_a_token_id_of_a_prompt_is_one_of_an_input(value: object) -> None:
    prompt, one, of_many = (
        error_of(raw_line(body)) for body in ({"prompt": [7, value]}, {"input": [7, value]}, {"input": [[7, value]]})
    )

    assert (prompt.code, prompt.param) == (one.code, "prompt[1]")
    assert (one.code, one.param, of_many.param) == (of_many.code, "input[1]", "input[0]")
    for error in (prompt, one, of_many):
        assert f"is {json.dumps(value)}; accepted: " in error.message
