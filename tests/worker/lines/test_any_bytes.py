"""Whatever the bytes are: a RequestLine or a LineError, never another exception."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from settings import LimitSettings
from worker.lines.bodies import CompletionBody
from worker.lines.chat import ChatBody, ChatMessage
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line
from worker.lines.request_line import RequestLine
from worker.records.failure import line_error_record
from worker.records.record import RecordContext, encode_record

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
