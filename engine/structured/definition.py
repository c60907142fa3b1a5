"""Grammars in the form that llguidance reads."""

from __future__ import annotations

from llguidance import LLMatcher, grammar_from

from engine.structured.grammar import Grammar
from engine.structured.lark_rules import form_rules, form_schema, schema_text


def definition(grammar: Grammar) -> str:
    """The grammar as llguidance reads it; not compiled yet.

    Raises ValueError with a text for whoever wrote the grammar.
    """
    if grammar.kind == "lark":
        return grammar_from("grammar", grammar.text)  # Lark, or GBNF, which is converted
    if grammar.kind in ("json_object", "json_schema"):  # faults of a rule's schema are told with all of the rule
        return LLMatcher.grammar_from_json_schema(schema_text(form_schema(grammar.kind, grammar.text)))
    return LLMatcher.grammar_from_lark(form_rules("start", grammar.kind, grammar.text))
