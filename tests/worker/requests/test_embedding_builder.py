from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import InvalidRequest, PromptTooLong
from engine.request import EmbeddingRequest, Request
from engine.text.tokenizer import Tokenizer
from tests.support.build_request import build_request
from tests.support.request_lines import chat_line, completion_line, parse, raw_line
from tests.support.served_models import served_model
from tests.support.tiny_embedders import make_word_piece_tokenizer
from worker.requests.builder import RequestBuilder


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
