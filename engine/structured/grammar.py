"""Describes the form of an output; writes JSON schemas, regular expressions and choices as Lark rules.

Schemas that llguidance would accept without enforcing them are refused. Imports no library: a request holds a Grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

FormKind = Literal["json_object", "json_schema", "regex", "choice"]  # GrammarKind without lark

# How llguidance reads schemas. Every option is set, so that an "x-guidance" in a schema changes nothing. Between two
# parts of a JSON text stands nothing, one space, or a line break with up to 32 spaces: with any amount allowed, a model
# may spend all of its tokens on blanks. Nothing is written as \u....: a key written so would pass as another than the
# one `properties` names. The escapes that are left give each character one spelling.
_JSON_READING: Mapping[str, str | bool] = {
    "whitespace_pattern": r"(\x20|\x0A\x20{0,32})",
    "item_separator": ",",
    "key_separator": ":",
    "json_allowed_escapes": '"\\nrtbf',
    "coerce_one_of": False,
    "lenient": False,
}
ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_ESCAPED_OR_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
# Lark ends a regular expression at a slash and at a line's end; escaped, a newline still means itself.
_IN_LARK = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}

# Keys whose values are data, not schemas.
_DATA = frozenset({"const", "enum", "default", "examples", "required"})
# Keys whose values are objects of schemas, under any names.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# Where an object begins, a row of the parser holds four items for each: see MAX_ITEMS_IN_ROW in `trial`.
MAX_OPTIONAL_PROPERTIES = 2_000
# The compiler reads numbers as doubles, and writes whole ones from those, with 64 bits: 2^53 + 1 would become 2^53.
MAX_EXACT = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Characters that JSON writes as \u.... only, and 0x7F, which the compiler has no other way to write either.
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a request's output must look like, all of it. Equal ones are compiled once."""

    kind: GrammarKind
    text: str  # a JSON schema, a JSON list of the choices, a regular expression, Lark or GBNF; "" for json_object
    # What the caller calls it, for error messages alone: two requests may mean the same grammar by different names.
    param: str = field(default="grammar", compare=False, repr=False)


def form_rules(name: str, kind: FormKind, text: str) -> str:
    """Lark rules that hold `name` to what a `Grammar` of this kind and text holds a whole answer to.

    Raises ValueError; its text is for the author of a schema.
    """
    if kind == "regex":
        escaped = _ESCAPED_OR_SLASH.sub(lambda found: _IN_LARK.get(found.group(), found.group()), text)
        return f"{name}: /{escaped or '(?:)'}/"  # two slashes would begin a comment
    if kind == "choice":
        # One terminal: as alternatives of a rule, each would be an item of one row of the parser, which has a limit.
        return f"{name}: {name.upper()}\n{name.upper()}: {' | '.join(map(quoted, json.loads(text)))}"
    return json_rule(name, form_schema(kind, text))


def json_rule(name: str, schema: object) -> str:
    """The Lark rule that `name` is JSON by `schema`. Raises ValueError."""
    return f"{name}: %json {schema_text(schema)}"


def form_schema(kind: Literal["json_object", "json_schema"], text: str) -> object:
    """The schema of a form that is JSON."""
    return ANY_OBJECT if kind == "json_object" else json.loads(text)


def schema_text(schema: object) -> str:
    """A schema in llguidance's form, with how it is to be read. Raises ValueError for what is not enforced."""
    if not isinstance(schema, Mapping):
        raise ValueError("the JSON schema is no object; accepted: an object")
    check_json_schema(schema)
    return json.dumps({**schema, "x-guidance": _JSON_READING})


def quoted(text: str) -> str:
    """A text as Lark writes it, which is JSON's way."""
    return json.dumps(text)


def check_json_schema(schema: object) -> None:
    """Raise ValueError for what the compiler accepts and does not enforce, or would fail at in the middle of a text.

    minProperties is one: keys that only additionalProperties or patternProperties allow may come twice, counted once.
    """
    for node in _schemas(schema):
        fewest, required, properties = (node.get(key) for key in ("minProperties", "required", "properties"))
        surely = len(required) if isinstance(required, list) else 0
        if isinstance(fewest, int | float) and fewest > max(1, surely):
            raise ValueError(f"minProperties is {fewest}; accepted: at most 1, or the number of required properties")
        optional = len(properties) - surely if isinstance(properties, dict) else 0
        if optional > MAX_OPTIONAL_PROPERTIES:
            raise ValueError(
                f"properties has {optional} that are not required; accepted: at most {MAX_OPTIONAL_PROPERTIES}"
            )
        for key in ("const", "enum"):
            _check_writable(key, node.get(key))
        _check_bounds(node)


def _schemas(schema: object) -> Iterator[Mapping[str, object]]:
    """Every object inside a schema that may be a schema itself, and the schema."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            yield node
            for key, value in node.items():
                if key in _NAMED and isinstance(value, dict):
                    pending += value.values()
                elif key not in _DATA:
                    pending.append(value)


def _check_writable(key: str, data: object) -> None:
    pending = [data]
    while pending:
        value = pending.pop()
        if isinstance(value, str) and (found := _UNWRITABLE.search(value)):
            accepted = r"of the control characters \b, \f, \n, \r and \t"
            raise ValueError(f"{key} holds the character U+{ord(found.group()):04X}; accepted: {accepted}")
        if _is_whole(value) and abs(value) > MAX_EXACT:
            raise ValueError(f"{key} holds {str(value)[:40]}; accepted: whole numbers of at most {MAX_EXACT}")
        if isinstance(value, list | dict):
            pending += value.values() if isinstance(value, dict) else value


def _check_bounds(schema: Mapping[str, object]) -> None:
    """Raise ValueError for a bound that, as the compiler takes it, may let numbers beyond it pass.

    Of integers it is rounded to a double, then to 64 bits; of other numbers it is a double's shortest decimal.
    """
    kinds = schema.get("type", "number")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    for key in _BOUNDS if "number" in kinds or "integer" in kinds else ():
        bound = schema.get(key)
        if not _is_whole(bound):
            continue
        last = int(bound) + {"exclusiveMinimum": 1, "exclusiveMaximum": -1}.get(key, 0)
        taken = _in_64_bits(int(float(_in_64_bits(last))))
        is_kept = key in ("minimum", "maximum") and (taken >= last if key == "minimum" else taken <= last)
        if abs(last) > MAX_EXACT and ("number" in kinds or not is_kept):
            raise ValueError(
                f"{key} is {str(bound)[:40]}; accepted: numbers of at most {MAX_EXACT} on either side of 0"
            )


def _in_64_bits(number: int) -> int:
    return max(min(number, 2**63 - 1), -(2**63))


def _is_whole(value: object) -> TypeGuard[int | float]:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
