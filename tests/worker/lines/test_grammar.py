"""What a line may say its answer must look like."""

from __future__ import annotations

import json

import pytest

from tests.support.request_lines import body_of, chat_line, completion_line, error_of
from worker.lines.grammar import GivenGrammar

SCHEMA = {"type": "object", "properties": {"b": {"const": "é"}, "a": {"minimum": 1.0}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"const":"é"},"a":{"minimum":1.0}}}'
FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": SCHEMA, "strict": True}}

GIVEN: list[tuple[dict[str, object], GivenGrammar | None]] = [
    ({}, None),
    ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "text"}, "guided_regex": "a+"}, GivenGrammar("regex", "a+", "guided_regex")),
    ({"response_format": {"type": "json_object"}}, GivenGrammar("json_object", "", "response_format")),
    ({"response_format": FORMAT}, GivenGrammar("json_schema", SCHEMA_TEXT, "response_format")),
    ({"guided_json": SCHEMA}, GivenGrammar("json_schema", SCHEMA_TEXT, "guided_json")),
    ({"guided_json": json.dumps(SCHEMA)}, GivenGrammar("json_schema", SCHEMA_TEXT, "guided_json")),
    ({"guided_choice": ["b", "a", "b"]}, GivenGrammar("choice", '["b","a"]', "guided_choice")),
    ({"guided_grammar": "root ::= [a]"}, GivenGrammar("lark", "root ::= [a]", "guided_grammar")),
    ({"structured_outputs": {"json": SCHEMA}}, GivenGrammar("json_schema", SCHEMA_TEXT, "structured_outputs")),
    ({"structured_outputs": {"regex": "a"}}, GivenGrammar("regex", "a", "structured_outputs")),
    ({"structured_outputs": {"choice": ["a"]}}, GivenGrammar("choice", '["a"]', "structured_outputs")),
    ({"structured_outputs": {"grammar": "start: a"}}, GivenGrammar("lark", "start: a", "structured_outputs")),
    ({"structured_outputs": {"json_object": True}}, GivenGrammar("json_object", "", "structured_outputs")),
    (
        {"structured_outputs": {"regex": "a", "json_object": False}},
        GivenGrammar("regex", "a", "structured_outputs"),
    ),
]

BAD: list[tuple[dict[str, object], str, str]] = [
    ({"response_format": "json"}, "invalid_type", "response_format"),
    ({"response_format": {}}, "missing_parameter", "response_format.type"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "missing_parameter", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}},
        "invalid_value",
        "response_format.json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "missing_parameter",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "invalid_value",
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": [1]}}},
        "invalid_type",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "yes"}}},
        "invalid_type",
        "response_format.json_schema.strict",
    ),
    ({"guided_json": 3}, "invalid_type", "guided_json"),
    ({"guided_json": "{"}, "invalid_value", "guided_json"),
    ({"guided_json": "[" * 100_000}, "invalid_value", "guided_json"),
    ({"guided_json": '{"minimum": NaN}'}, "invalid_value", "guided_json"),
    ({"guided_json": '{"minimum": 1e999}'}, "invalid_value", "guided_json"),
    ({"guided_json": '{"const": 1, "const": 2}'}, "invalid_value", "guided_json"),
    ({"guided_json": '{"const": "\\ud800"}'}, "invalid_value", "guided_json"),
    ({"guided_json": "true"}, "invalid_type", "guided_json"),
    ({"guided_regex": ""}, "invalid_value", "guided_regex"),
    ({"guided_regex": 1}, "invalid_type", "guided_regex"),
    ({"guided_choice": []}, "invalid_type", "guided_choice"),
    ({"guided_choice": "a"}, "invalid_type", "guided_choice"),
    ({"guided_choice": ["a", 1]}, "invalid_type", "guided_choice[1]"),
    ({"guided_choice": ["a", ""]}, "invalid_value", "guided_choice[1]"),
    ({"guided_grammar": ""}, "invalid_value", "guided_grammar"),
    ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"json_object": 1}}, "invalid_type", "structured_outputs.json_object"),
    ({"structured_outputs": {"grammar": ""}}, "invalid_value", "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": "a"}}, "unknown_parameter", "structured_outputs.structural_tag"),
    ({"response_format": FORMAT, "guided_regex": "a"}, "invalid_value", "guided_regex"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "invalid_value", "guided_choice"),
    ({"guided_decoding_backend": "xgrammar"}, "unsupported_parameter", "guided_decoding_backend"),
    ({"choice_logprobs": True}, "invalid_value", "choice_logprobs"),
    ({"choice_logprobs": True, "guided_regex": "a|b"}, "invalid_value", "choice_logprobs"),
    ({"choice_logprobs": 1, "guided_choice": ["a"]}, "invalid_type", "choice_logprobs"),
    ({"choice_logprobs": True, "guided_choice": [str(n) for n in range(257)]}, "invalid_value", "choice_logprobs"),
]


@pytest.mark.parametrize(("parameters", "grammar"), GIVEN, ids=lambda value: str(value)[:60])
def test_each_form_means_one_grammar_for_both_endpoints(
    parameters: dict[str, object], grammar: GivenGrammar | None
) -> None:
    assert body_of(chat_line(**parameters)).grammar == grammar
    assert body_of(completion_line(**parameters)).grammar == grammar


@pytest.mark.parametrize(("parameters", "code", "param"), BAD, ids=lambda value: str(value)[:60])
def test_a_bad_form_is_named(parameters: dict[str, object], code: str, param: str) -> None:
    for raw in (chat_line(**parameters), completion_line(**parameters)):
        error = error_of(raw)
        assert (error.code, error.param) == (code, param)


def test_of_two_grammars_the_second_is_refused_and_the_first_named() -> None:
    error = error_of(chat_line(guided_json={}, response_format={"type": "json_object"}))
    assert error.message == "guided_json is {}; accepted: a line without it, or without response_format"


@pytest.mark.parametrize("depth", [33, 500, 980, 988, 1000, 20_000])
def test_json_in_a_string_may_nest_as_deep_as_a_line(depth: int) -> None:
    nested = '{"not":' * depth + "{}" + "}" * depth
    error = error_of(chat_line(guided_json=nested))

    assert (error.code, error.param) == ("invalid_value", "guided_json")
    assert error.message.endswith(
        "accepted: a JSON schema, an object, as JSON of at most 32 levels (limits.max_json_depth), no key twice in an "
        "object, finite numbers"
    )
    assert body_of(chat_line(guided_json='{"not":' * 31 + "{}" + "}" * 31)).grammar is not None


@pytest.mark.parametrize("given", [{"guided_choice": ["b", "a", "b"]}, {"structured_outputs": {"choice": ["b", "a"]}}])
def test_choices_are_scored_where_asked_for_each_once(given: dict[str, object]) -> None:
    assert body_of(chat_line(**given, choice_logprobs=True)).scored_choices == ["b", "a"]
    assert body_of(completion_line(**given, choice_logprobs=True)).scored_choices == ["b", "a"]
    assert body_of(chat_line(**given, choice_logprobs=False)).scored_choices == []
    assert body_of(chat_line(**given)).scored_choices == []
