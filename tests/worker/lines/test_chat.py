"""The shapes a chat message may have, and tools on offer."""

from __future__ import annotations

from typing import Any

import pytest

from settings import LimitSettings
from tests.support.request_lines import chat_line, completion_line, error_of, parse, raw_line
from worker.lines.chat import ChatBody, ChatMessage
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "strict": True,
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "description": None,
    },
}
OTHER = {"type": "function", "function": {"name": "time-2"}}


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


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def body(**parameters: object) -> ChatBody:
    found = parse(chat_line(**parameters)).body
    assert isinstance(found, ChatBody)
    return found


def test_a_tool_is_kept_as_the_line_had_it() -> None:
    [tool, _] = body(tools=[TOOL, OTHER]).tools

    assert tool.as_given() == TOOL
    assert list(tool.as_given()["function"]) == ["strict", "name", "parameters", "description"]  # type: ignore[call-overload]  # JSON
    assert (tool.function.name, tool.function.description, tool.function.strict) == ("get_weather", None, True)


@pytest.mark.parametrize("choice", [None, "auto", "required", named("time-2")])
def test_tools_are_offered_unless_none_may_be_called(choice: object) -> None:
    assert body(tools=[TOOL, OTHER], tool_choice=choice).offered_tools == body(tools=[TOOL, OTHER]).tools
    assert body(tools=[TOOL], tool_choice="none").offered_tools == ()


def test_no_tools_are_no_tools() -> None:
    assert body(tools=[], tool_choice="none", parallel_tool_calls=False).offered_tools == ()
    assert body(tools=None, tool_choice=None, parallel_tool_calls=None) == body()


@pytest.mark.parametrize(
    ("parameters", "code", "param"),
    [
        ({"tools": [TOOL, OTHER, TOOL]}, "invalid_value", "tools[2].function.name"),
        ({"tools": {}}, "invalid_type", "tools"),
        ({"tools": ["f"]}, "invalid_type", "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "invalid_value", "tools[0].type"),
        ({"tools": [{"function": {"name": "f"}}]}, "missing_parameter", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "missing_parameter", "tools[0].function"),
        ({"tools": [named("")]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [named("a b")]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [named("é")]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [named("x" * 65)]}, "invalid_value", "tools[0].function.name"),
        ({"tools": [named("f") | {"strict": True}]}, "unknown_parameter", "tools[0].strict"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "invalid_type",
            "tools[0].function.parameters",
        ),
        ({"tools": [named(f"f{n}") for n in range(129)]}, "invalid_value", "tools"),
        ({"tool_choice": "auto"}, "invalid_value", "tool_choice"),
        ({"tool_choice": named("f")}, "invalid_value", "tool_choice"),
        ({"tools": [OTHER], "tool_choice": "any"}, "invalid_value", "tool_choice"),
        ({"tools": [OTHER], "tool_choice": named("f")}, "invalid_value", "tool_choice.function.name"),
        ({"tools": [OTHER], "tool_choice": {"type": "allowed_tools"}}, "invalid_value", "tool_choice.type"),
        ({"tools": [OTHER], "parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls"),
        ({"functions": [OTHER["function"]]}, "unsupported_parameter", "functions"),
        ({"function_call": "auto"}, "unsupported_parameter", "function_call"),
    ],
    ids=str,
)
def test_a_fault_of_the_tools_is_named(parameters: dict[str, object], code: str, param: str) -> None:
    error = error_of(chat_line(**parameters))

    assert (error.code, error.param) == (code, param)


def test_the_operator_sets_how_many_tools_a_line_may_have() -> None:
    with pytest.raises(LineError, match=r"tools has 2 entries; accepted: at most 1 \(limits.max_tools\)"):
        parse_request_line(chat_line(tools=[TOOL, OTHER]), 0, LimitSettings(max_tools=1))


def test_prompts_sort_by_tools_behind_the_systems_text() -> None:
    system = {"role": "system", "content": "s"}
    user = {"role": "user", "content": "u"}

    def key(messages: list[dict[str, str]], **parameters: object) -> str:
        return parse(chat_line(messages=messages, **parameters)).prompt_key()

    shared = key([system, user], tools=[OTHER])
    assert shared.startswith(key([system]))
    assert key([user], tools=[OTHER]).startswith("mtools")
    assert key([system, user], tools=[OTHER], tool_choice="none") == key([system, user])


def test_completions_take_no_tools() -> None:
    assert error_of(completion_line(tools=[TOOL])).code == "unsupported_parameter"
    assert error_of(completion_line(reasoning_effort="low")).code == "unsupported_parameter"
