"""What is refused of a JSON schema before it is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

# Their values are data, not schemas.
_DATA = frozenset({"const", "enum", "default", "examples", "required"})
# Their values are not schemas but objects of schemas, under any names.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# A parser's row holds four items for each where an object begins: see MAX_ITEMS_IN_ROW of compile_matcher.
MAX_OPTIONAL_PROPERTIES = 2_000
# Characters that JSON writes as \u.... only, and 0x7F, which the compiler has no other way to write either.
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def check_json_schema(schema: object) -> None:
    """Raise ValueError for what the compiler takes and does not hold to, or would fail at while a text is written.

    It lets keys that only additionalProperties or patternProperties allow be written twice; they count once.
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


def _schemas(schema: object) -> Iterator[Mapping[str, object]]:
    """Every object of a schema that may be a schema itself."""
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
        if isinstance(value, list | dict):
            pending += value.values() if isinstance(value, dict) else value
