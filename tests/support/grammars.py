"""Requests whose output is held to a grammar."""

from __future__ import annotations

import json
from typing import Any

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.structured.grammar import Grammar

PROMPT = tuple(range(40, 70))
POINT: dict[str, object] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 999}, "y": {"enum": ["left", "right"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
# What a grammar of a few bytes can do: hours of compiling, or a stack overflow that kills the process.
SLOW_SCHEMA: dict[str, object] = {"type": "integer", "multipleOf": 99_999_989}
DEEP_SCHEMA: dict[str, object] = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2500)} | {"a2500": {"type": "integer"}},
}


def schema_grammar(schema: object, param: str = "response_format") -> Grammar:
    return Grammar("json_schema", json.dumps(schema), param)


def held_request(request_id: str, grammar: Grammar | None, prompt: tuple[int, ...] = PROMPT, **params: Any) -> Request:
    """Seeded and at temperature 1 unless told otherwise."""
    options: dict[str, Any] = {"max_tokens": 200, "seed": 1} | params
    return Request(request_id, prompt, SamplingParams(grammar=grammar, **options))
