"""Forms of an answer as rules of a Lark grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Literal

from engine.structured.json_schema_checks import check_json_schema

FormKind = Literal["json_object", "json_schema", "regex", "choice"]  # GrammarKind's, but for a grammar of its own

# How schemas are read. All of it is set, so that an "x-guidance" in a schema decides nothing: what cannot be held to is
# refused. Between two parts of a JSON text stands nothing, one space, or a line break with up to 32 spaces of
# indentation: with any amount allowed, a model may spend all of its tokens on blanks. Nothing is written as \u....: a
# key written so would pass as another than the one `properties` names. Other escapes leave one way to write each.
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


def form_rules(name: str, kind: FormKind, text: str) -> str:
    """Lark's rules for `name` to be what a `Grammar` of this kind and text makes of a whole answer.

    Raises ValueError with a text for whoever wrote a schema.
    """
    if kind == "regex":
        escaped = _ESCAPED_OR_SLASH.sub(lambda found: _IN_LARK.get(found.group(), found.group()), text)
        return f"{name}: /{escaped or '(?:)'}/"  # two slashes would begin a comment
    if kind == "choice":
        # One terminal: as alternatives of a rule, each would be an item of one row of the parser, which has a limit.
        return f"{name}: {name.upper()}\n{name.upper()}: {' | '.join(map(quoted, json.loads(text)))}"
    return json_rule(name, form_schema(kind, text))


def json_rule(name: str, schema: object) -> str:
    """Lark's rule for `name` to be JSON by `schema`. Raises ValueError."""
    return f"{name}: %json {schema_text(schema)}"


def form_schema(kind: Literal["json_object", "json_schema"], text: str) -> object:
    """The schema of a form that is JSON."""
    return ANY_OBJECT if kind == "json_object" else json.loads(text)


def schema_text(schema: object) -> str:
    """A schema as llguidance takes it, with how it is to be read. Raises ValueError for what is not held to."""
    if not isinstance(schema, Mapping):
        raise ValueError("the JSON schema is no object; accepted: an object")
    check_json_schema(schema)
    return json.dumps({**schema, "x-guidance": _JSON_READING})


def quoted(text: str) -> str:
    """A text as Lark writes it, which is JSON's way."""
    return json.dumps(text)
