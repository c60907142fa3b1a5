"""Grammars in the form that llguidance reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from llguidance import LLMatcher, grammar_from

from engine.structured.grammar import Grammar
from engine.structured.json_schema_checks import check_json_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# How schemas are read. All of it is set, so that an "x-guidance" in a schema decides nothing: what cannot be held to is
# refused. Between two parts of a JSON text stands nothing, one space, or a line break with up to 32 spaces of
# indentation: with any amount allowed, a model may spend all of its tokens on blanks. Nothing is written as \u....: a
# key written so would pass as another than the one `properties` names. Other escapes leave one way to write each.
JSON_READING: Mapping[str, str | bool] = {
    "whitespace_pattern": r"(\x20|\x0A\x20{0,32})",
    "item_separator": ",",
    "key_separator": ":",
    "json_allowed_escapes": '"\\nrtbf',
    "coerce_one_of": False,
    "lenient": False,
}


def definition(grammar: Grammar) -> str:
    """The grammar as llguidance reads it; not compiled yet.

    Raises ValueError with a text for whoever wrote the grammar.
    """
    if grammar.kind == "json_object":
        return _of_schema('{"type":"object"}')
    if grammar.kind == "json_schema":
        check_json_schema(json.loads(grammar.text))
        return _of_schema(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("\n".join(choice_rules("start", json.loads(grammar.text))))
    return grammar_from("grammar", grammar.text)  # Lark, or GBNF, which is converted


def choice_rules(name: str, choices: Sequence[str]) -> list[str]:
    """Lark's rules for `name` to be one of some texts.

    They are one terminal: as alternatives of a rule, each would be an item of one row of the parser, which has a limit.
    """
    return [f"{name}: {name.upper()}", f"{name.upper()}: {' | '.join(map(json.dumps, choices))}"]


def _of_schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, overrides=cast("JsonCompileOptions", JSON_READING))
