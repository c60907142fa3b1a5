"""The shapes a message may have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.request_lines import error_of, parse, raw_line
from worker.lines.chat import ChatBody, ChatMessage

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def message(**fields: object) -> ChatMessage:
    body = parse(raw_line({"messages": [fields]})).body
    assert isinstance(body, ChatBody)
    return body.messages[0]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize(("content", "text"), [("one\ntwo", "one\ntwo"), (PARTS, "one\ntwo"), ("", "")])
def test_content_is_a_string_or_parts_in_every_role(role: str, content: object, text: str) -> None:
    assert message(role=role, content=content).text == text
    assert message(role=role, content=content).for_template() == {"role": role, "content": text}


def test_parts_may_be_kept() -> None:
    assert message(role="user", content=PARTS).for_template(keep_parts=True)["content"] == PARTS
    assert message(role="user", content="one").for_template(keep_parts=True)["content"] == "one"


@pytest.mark.parametrize(
    "fields",
    [
        {"content": None, "refusal": "I cannot."},
        {"refusal": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": [{"type": "text", "text": "I cannot."}]},
    ],
)
def test_a_refusal_is_what_the_assistant_said(fields: dict[str, object]) -> None:
    found = message(role="assistant", **fields)

    assert (found.text, found.for_template()["content"]) == ("I cannot.", "I cannot.")
    kept = found.for_template(keep_parts=True)["content"]
    assert kept in ("I cannot.", [{"type": "text", "text": "I cannot."}])


@pytest.mark.parametrize(
    "fields",
    [
        {"content": None, "tool_calls": [CALL]},
        {"tool_calls": [CALL]},
        {"content": None, "reasoning_content": "hm"},
        {"content": "", "tool_calls": None},
    ],
)
def test_an_assistant_may_call_or_think_without_a_word(fields: dict[str, object]) -> None:
    assert message(role="assistant", **fields).text == ""


@pytest.mark.parametrize(
    ("arguments", "found"), [("", {}), ("{}", {}), ('{"a": [1]}', {"a": [1]}), ({"a": 1}, {"a": 1})]
)
def test_arguments_are_an_object_however_they_are_written(arguments: object, found: dict[str, object]) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}

    given: Any = message(role="assistant", tool_calls=[call]).for_template()["tool_calls"]

    assert given[0] == {"id": "c", "type": "function", "function": {"name": "f", "arguments": found}}


def test_a_message_as_this_service_answers_it_may_come_back() -> None:
    answer = {
        "role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm", "tool_calls": [CALL],
        "annotations": [], "audio": None, "function_call": None,
    }  # fmt: skip
    assert message(**answer).reasoning_content == "hm"


@pytest.mark.parametrize(
    ("fields", "code", "at"),
    [
        ({"role": "function", "name": "f", "content": "1"}, "invalid_value", ".role"),
        ({"role": "user"}, "missing_parameter", ".content"),
        ({"role": "user", "content": None}, "missing_parameter", ".content"),
        ({"role": "user", "content": "a", "refusal": "b"}, "invalid_value", ".refusal"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "invalid_value", ".tool_calls"),
        ({"role": "assistant", "content": "a", "refusal": "b"}, "invalid_value", ".refusal"),
        ({"role": "assistant", "content": "a", "function_call": {}}, "invalid_type", ".function_call"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "invalid_type", ".audio"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "invalid_value", ".tool_calls[0].type"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": NaN}'}}]},
            "invalid_value",
            ".tool_calls[0].function.arguments",
        ),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "b"}]}, "invalid_value", ".content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "missing_parameter", ".content[0].text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "refusal": "b"}]},
            "invalid_value",
            ".content[0].refusal",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "invalid_value", ".content[0].type"),
        ({"role": "user", "content": ["a"]}, "invalid_type", ".content[0]"),
    ],
    ids=str,
)
def test_a_fault_of_a_message_is_named(fields: dict[str, object], code: str, at: str) -> None:
    error = error_of(raw_line({"messages": [{"role": "user", "content": "hi"}, fields]}))

    assert (error.code, error.param) == (code, f"messages[1]{at}")
