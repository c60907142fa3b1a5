"""Numbers in range reach the engine, others are refused at parse in its words; any bytes give a line or a LineError."""

from __future__ import annotations

import json
import math
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampling_params
from engine.errors import InvalidRequest
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from settings import LimitSettings
from tests.support.fake_engine import served_model
from tests.support.request_lines import build_request, chat_line, completion_line, error_of, parse, raw_line
from tests.support.tiny_tokenizer import make_tokenizer
from worker.lines import fields as bounds
from worker.lines.bodies import CompletionBody
from worker.lines.chat import ChatBody, ChatMessage
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line
from worker.lines.request_line import RequestLine
from worker.records.failure import line_error_record
from worker.records.record import RecordContext, encode_record
from worker.requests.builder import RequestBuilder

# Parameter -> the outermost values inside its range, and the innermost ones outside. Every number that chooses tokens.
EDGES: dict[str, tuple[list[float], list[float]]] = {
    "temperature": ([0, 1e-5, 1e4], [-0.1, 5e-324, 9.9e-6, math.nextafter(1e4, math.inf), 1e308]),
    "top_p": ([5e-324, 1], [0, -1, 1.0000001]),
    "top_k": ([0, 2**31 - 1], [-2, 2**31, 10**30]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "repetition_penalty": ([0.01, 100], [0, 5e-324, 0.0099, 100.1, 1e300]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "seed": ([-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63, 10**4000]),
}
INSIDE = [(name, value) for name, (inside, _) in EDGES.items() for value in inside]
OUTSIDE = [(name, value) for name, (_, outside) in EDGES.items() for value in outside]

LIMITS = LimitSettings(max_json_depth=6, max_prompt_bytes=4096)
KEYS = sorted(
    {*CompletionBody.model_fields, *ChatBody.model_fields, *ChatMessage.model_fields}
    | {"custom_id", "method", "url", "body", "type", "text", "function", "arguments", "stream", "tool_choice"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.text(st.characters(categories=["Cs"]), max_size=2)
    | st.sampled_from(["POST", "/v1/completions", "/v1/chat/completions", "user", "assistant", "text", "function"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=20,
)


def ids(value: object) -> str:
    return str(value)[:30]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> RequestBuilder:
    tokenizer_path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(tokenizer_path)
    return served_model(Tokenizer.from_directory(tokenizer_path)).requests


@pytest.mark.parametrize(("name", "value"), INSIDE, ids=ids)
def test_what_the_parser_accepts_reaches_the_engine(builder: RequestBuilder, name: str, value: float) -> None:
    line = parse(completion_line(**{name: value}))
    request = build_request(builder, line, "r")

    assert getattr(line.body, name) == value
    assert isinstance(request, Request)
    assert getattr(request.params, name) == value


def test_every_number_that_chooses_tokens_has_edges_here() -> None:
    given, taken = get_type_hints(CompletionBody), get_type_hints(SamplingParams)
    numbers = {name for name in given.keys() & taken.keys() if given[name] in (int, float, int | None)}
    lengths = {"max_tokens", "min_tokens", "n", "logprobs"}  # the engine judges them by the model and by each other

    assert numbers - lengths == EDGES.keys()


@pytest.mark.parametrize(("name", "value"), OUTSIDE, ids=ids)
def test_what_the_parser_refuses_the_engine_refuses_in_the_same_words(name: str, value: float) -> None:
    error = error_of(completion_line(**{name: value}))

    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**{name: value})  # type: ignore[arg-type]  # one parameter of many types

    assert (error.code, error.param) == ("invalid_value", name)
    assert error.message.endswith(f"accepted: {raised.value.accepted}")
    assert len(error.message) < 200


@pytest.mark.parametrize(
    "name",
    ["MAX_SEED", "MAX_TOP_K", "MIN_TEMPERATURE", "MAX_TEMPERATURE", "MIN_REPETITION_PENALTY", "MAX_REPETITION_PENALTY"],
)
def test_parser_and_engine_have_the_same_constants(name: str) -> None:
    assert getattr(bounds, name) == getattr(sampling_params, name)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (completion_line(max_tokens=10**4000), "max_tokens"),
        (completion_line(min_tokens=10**30), "min_tokens"),
        (completion_line(n=10**30), "n"),
        (completion_line(logprobs=10**4000), "logprobs"),
        (completion_line(stop_token_ids=[1, 10**20]), "stop_token_ids[1]"),
        (completion_line(logit_bias={"9999999999": 1}), "logit_bias.9999999999"),
        (completion_line(temperature=10**400), "temperature"),
        (raw_line({"prompt": [1, 10**4200]}), "prompt[1]"),
        (chat_line(max_completion_tokens=10**30), "max_completion_tokens"),
        (chat_line(logprobs=True, top_logprobs=10**30), "top_logprobs"),
    ],
    ids=ids,
)
def test_a_number_of_any_length_is_refused_in_a_short_message(raw: bytes, param: str) -> None:
    error = error_of(raw)

    assert error.param == param
    assert len(error.message) < 200


def check(raw: bytes) -> None:
    try:
        line = parse_request_line(raw, 3, LIMITS)
    except LineError as error:
        check_error(error)
    else:
        assert isinstance(line, RequestLine)
        line.custom_id.encode("utf-8")
        line.prompt_key().encode("utf-8")


def check_error(error: LineError) -> None:
    record = json.loads(encode_record(line_error_record(error, RecordContext("j", "m", 0))))
    assert record["response"]["status_code"] == 400
    assert error.message.isascii()


@given(st.binary(max_size=200))
def test_any_bytes(raw: bytes) -> None:
    check(raw)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8))
@settings(max_examples=200)
def test_any_object_with_known_keys(value: dict[str, object]) -> None:
    check(json.dumps(value).encode("utf-8"))


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5), st.lists(VALUES, max_size=3), st.booleans())
@settings(max_examples=100)
def test_any_conversation(parameters: dict[str, object], messages: list[object], is_chat: bool) -> None:
    body = {**parameters, "messages": messages} if is_chat else {**parameters, "prompt": messages}
    check(json.dumps(body, ensure_ascii=True).encode("utf-8"))


@given(st.integers(0, 40), st.data())
def test_a_good_line_with_one_byte_changed(position: int, data: st.DataObject) -> None:
    raw = bytearray(rb'{"prompt":"\ud83d\ude00","temperature":0.5,"stop":["a"],"logit_bias":{"1":-1e0}}')
    raw[position % len(raw)] = data.draw(st.integers(0, 255))
    check(bytes(raw))
