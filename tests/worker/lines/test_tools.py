"""Tools on offer, and which of them may or must be called."""

from __future__ import annotations

from typing import Any

import pytest

from settings import LimitSettings
from tests.support.request_lines import chat_line, completion_line, error_of, parse
from worker.lines.chat import ChatBody
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line

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
