"""The Lark rules of tool calls."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import InvalidRequest
from engine.structured.grammar import ANY_OBJECT, json_rule, quoted
from worker.lines.chat_body import ChatBody
from worker.lines.tool_choice import ToolChoice
from worker.lines.tool_function import ToolFunction

_NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_SAY_WHAT = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum"})


def call_rules(body: ChatBody, *, key: str, is_forced: bool) -> list[str]:
    """`call`: the object of a name and arguments (under `key`) of one of the functions that may be called.

    Arguments keep to the function's schema where it is strict or `is_forced`. Raises InvalidRequest for a schema.
    """
    calls: list[str] = []
    rules: list[str] = []
    for position, tool in enumerate(body.offered_tools):
        function = tool.function
        if isinstance(body.tool_choice, ToolChoice) and body.tool_choice.function.name != function.name:
            continue
        head = quoted(f'{{"name": "{function.name}", "{key}": ')
        calls.append(f'{head} arguments{position} "}}"')
        schema = _parameters(function) if is_forced or function.strict else ANY_OBJECT
        try:
            rules.append(json_rule(f"arguments{position}", schema))
        except ValueError as error:
            param = f"tools[{position}].function.parameters"
            raise InvalidRequest(f"{param}: {error}", param=param) from error
    return [f"call: {' | '.join(calls)}", *rules]


def _parameters(function: ToolFunction) -> Mapping[str, object]:
    if function.parameters is None:
        return _NO_ARGUMENTS  # as OpenAI reads their absence
    return function.parameters if _SAY_WHAT & function.parameters.keys() else {**ANY_OBJECT, **function.parameters}
