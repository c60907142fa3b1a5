"""Rules of Lark grammars: a tool's call, and the form an answer is given."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from engine.errors import InvalidRequest
from engine.structured.definition import JSON_READING, choice_rules
from engine.structured.json_schema_checks import check_json_schema
from worker.lines.chat_body import ChatBody
from worker.lines.given_grammar import GivenGrammar
from worker.lines.tool_choice import ToolChoice
from worker.lines.tool_function import ToolFunction

_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_SAY_WHAT = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum"})
_ESCAPED_OR_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
# Lark ends a regular expression at a slash and at a line's end; escaped, a newline still means itself.
_IN_LARK = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


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
        schema = _parameters(function) if is_forced or function.strict else _ANY_OBJECT
        _check(schema, f"tools[{position}].function.parameters")
        head = quoted(f'{{"name": "{function.name}", "{key}": ')
        calls.append(f'{head} arguments{position} "}}"')
        rules.append(f"arguments{position}: {_json(schema)}")
    return [f"call: {' | '.join(calls)}", *rules]


def shape_rule(given: GivenGrammar) -> str:
    """`shape`: what a line wants its answer to look like. Raises InvalidRequest where that has rules of its own."""
    if given.kind == "json_object":
        return f"shape: {_json(_ANY_OBJECT)}"
    if given.kind == "json_schema":
        schema = json.loads(given.text)
        _check(schema, given.param)
        return f"shape: {_json(schema)}"
    if given.kind == "choice":
        return "\n".join(choice_rules("shape", json.loads(given.text)))
    if given.kind == "regex":
        escaped = _ESCAPED_OR_SLASH.sub(lambda found: _IN_LARK.get(found.group(), found.group()), given.text)
        return f"shape: /{escaped}/"
    raise InvalidRequest(
        f"{given.param} is a grammar of its own, which neither tools nor a prompt that begins the reasoning leave room "
        "for; accepted: a JSON schema, a regular expression or choices",
        param=given.param,
        accepted="a JSON schema, a regular expression or choices",
    )


def quoted(text: str) -> str:
    """A text as Lark writes it, which is JSON's way."""
    return json.dumps(text)


def _parameters(function: ToolFunction) -> Mapping[str, object]:
    if function.parameters is None:
        return _NO_ARGUMENTS  # as OpenAI reads their absence
    return function.parameters if _SAY_WHAT & function.parameters.keys() else {**_ANY_OBJECT, **function.parameters}


def _json(schema: object) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_READING} if isinstance(schema, Mapping) else schema)


def _check(schema: object, param: str) -> None:
    try:
        check_json_schema(schema)
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
