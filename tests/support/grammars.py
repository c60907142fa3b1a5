"""Makes requests whose output follows a grammar, grammars whose trial waits for the test, and random JSON schemas.

The schemas have every keyword that grammars are compiled from, in sizes a small model can fill.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.structured.grammar import Grammar
from engine.structured.trial import GrammarTrials

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

TIMEOUT_S = 10.0

Schema = dict[str, object]

NAMES = ("id", "name", "a b", "überschrift", "x-1", "tags", "value", '"quoted"', "size", "next")
PATTERNS = ("^[a-c]{1,4}$", "^\\d{3}-\\d{2}$", "^(yes|no|maybe)$", "^[A-Z][a-z]{0,3}$", "^é?x+y?$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "duration")
MAX_DEPTH = 3


def schema_grammar(schema: object, param: str = "response_format") -> Grammar:
    return Grammar("json_schema", json.dumps(schema), param)


def grammar_request(
    request_id: str, grammar: Grammar | None, prompt: tuple[int, ...] = PROMPT, **params: Any
) -> Request:
    """A request whose output follows a grammar; seeded and at temperature 1 unless told otherwise."""
    options: dict[str, Any] = {"max_tokens": 200, "seed": 1} | params
    return Request(request_id, prompt, SamplingParams(grammar=grammar, **options))


class GatedTrials:
    """Lets every trial of a grammar wait for `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried: list[str] = []  # texts of the grammars, in the order of their trials
        self._has_begun = threading.Event()
        self._goes_on = threading.Event()
        definition = GrammarTrials.definition

        def definition_later(trials: GrammarTrials, grammar: Grammar) -> str:
            self.tried.append(grammar.text)
            self._has_begun.set()
            self._goes_on.wait(TIMEOUT_S)
            return definition(trials, grammar)

        monkeypatch.setattr(GrammarTrials, "definition", definition_later)

    def wait_begun(self) -> None:
        """Return once the first trial has begun."""
        assert self._has_begun.wait(TIMEOUT_S)

    def go_on(self) -> None:
        """Let all of them go on, now and later."""
        self._goes_on.set()


def random_schema(seed: int) -> Schema:
    """The schema that belongs to a number. Strings, lists and objects are bounded, nearly always."""
    draw = random.Random(seed)
    schema = _object(draw, 0) if draw.random() < 0.7 else _any(draw, 0)
    if draw.random() < 0.2:
        schema["$defs"] = {"leaf": _leaf(draw)}
        schema = _with_references(draw, schema)
    return schema


def _any(draw: random.Random, depth: int) -> Schema:
    if depth >= MAX_DEPTH:
        return _leaf(draw)
    makers: list[Callable[[random.Random, int], Schema]] = [_object, _array, _tuple, _any_of, _map, _all_of]
    return draw.choice(makers)(draw, depth) if draw.random() < 0.5 else _leaf(draw)


def _leaf(draw: random.Random) -> Schema:
    makers = (_integer, _number, _string, _pattern, _format, _enum, _constant, _nullable)
    return draw.choice(makers)(draw)


def _integer(draw: random.Random) -> Schema:
    low = draw.randint(-1000, 1000)
    schema: Schema = {"type": "integer", draw.choice(("minimum", "exclusiveMinimum")): low}
    schema[draw.choice(("maximum", "exclusiveMaximum"))] = low + draw.randint(20, 5000)
    if draw.random() < 0.2:
        return {"type": "integer", "multipleOf": draw.choice((2, 5, 7, 10)), "minimum": 0, "maximum": 500}
    return schema


def _number(draw: random.Random) -> Schema:
    low = draw.randint(-100, 100)
    return {"type": "number", "minimum": low, "maximum": low + draw.randint(1, 50) + 0.5}


def _string(draw: random.Random) -> Schema:
    shortest = draw.randint(0, 3)
    if draw.random() < 0.03:
        return {"type": "string", "minLength": shortest}
    return {"type": "string", "minLength": shortest, "maxLength": shortest + draw.randint(0, 6)}


def _pattern(draw: random.Random) -> Schema:
    return {"type": "string", "pattern": draw.choice(PATTERNS)}


def _format(draw: random.Random) -> Schema:
    return {"type": "string", "format": draw.choice(FORMATS)}


def _enum(draw: random.Random) -> Schema:
    values: list[object] = ["red", "gr\u00fcn", 1, 2.5, None, True, ["x"], {"k": "v"}, 'a"b\\c', ""]
    return {"enum": draw.sample(values, draw.randint(1, 5))}


def _constant(draw: random.Random) -> Schema:
    return {"const": draw.choice(("fixed", 42, None, False, [1, 2], {"a": {"b": []}}))}


def _nullable(draw: random.Random) -> Schema:
    return {"type": [draw.choice(("boolean", "integer")), "null"], "maximum": 99, "minimum": -99}


def _array(draw: random.Random, depth: int) -> Schema:
    fewest = draw.randint(0, 2)
    schema: Schema = {"type": "array", "items": _any(draw, depth + 1), "minItems": fewest}
    if draw.random() < 0.95:
        schema["maxItems"] = fewest + draw.randint(0, 2)
    return schema


def _tuple(draw: random.Random, depth: int) -> Schema:
    first = [_any(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": draw.randint(0, len(first))}


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth + 1) for _ in range(draw.randint(2, 3))]}


def _all_of(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.5:
        return {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 5}]}
    described = _object(draw, depth + 1)
    described.pop("additionalProperties", None)
    properties = described["properties"]
    names = dict.fromkeys(properties, True) if isinstance(properties, dict) else {}
    return {"allOf": [described, {"type": "object", "properties": names, "additionalProperties": False}]}


def _map(draw: random.Random, depth: int) -> Schema:
    values = _any(draw, depth + 1)
    most = draw.randint(0, 2)
    if draw.random() < 0.5:
        return {"type": "object", "additionalProperties": values, "maxProperties": most}
    keys = {"^k[0-9]$": values}
    return {"type": "object", "patternProperties": keys, "additionalProperties": False, "maxProperties": most}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "title": "ignored",
    }
    if draw.random() < 0.97:
        schema["additionalProperties"] = False
    return schema


def _with_references(draw: random.Random, schema: Schema) -> Schema:
    """Some of the properties become references, one of them to the schema itself: a list of itself, often empty."""
    properties = schema.get("properties")
    if isinstance(properties, dict):
        for name in properties:
            if draw.random() < 0.5:
                properties[name] = {"$ref": "#/$defs/leaf"}
        if "next" in properties:
            properties["next"] = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    return schema
