from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.records.answers import CalledTool, read_call, whole_value

NAMES = {"f", "g"}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', "{}"),
        ('{"name":"f","arguments":{"a":[1,2.50]}}', '{"a":[1,2.50]}'),
        ('{"name": "f", "parameters": {"a": "b"}}', '{"a": "b"}'),
        ('{\n "arguments" : { "a" : "\\u00e9" } ,\n "name" : "f" }', '{ "a" : "\\u00e9" }'),
        ('{"type": "function", "name": "f", "parameters": {"a": 1e999}}', '{"a": 1e999}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
    ],
)
def test_arguments_keep_the_models_spelling(text: str, arguments: str) -> None:
    assert read_call(text + " rest", 0, NAMES) == (CalledTool("f", arguments), len(text))


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{}", "[]", "null", '"f"', '{"name": "f"', '{"name": "f"}', '{"name": "f",}',
        '{"name": "f", "arguments": {"a": 1}', '{"name": "f", "arguments": {a: 1}}', '{"name" "f"}',
        '{"name": "h", "arguments": {}}', '{"name": 3, "arguments": {}}', '{"arguments": {}}',
        '{"name": "f", "arguments": []}', '{"name": "f", "arguments": null}', '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": "[1]"}', '{"name": "f", "arguments": {}, "parameters": {}}',
        '{"name": "f", "name": "g", "arguments": {}}', '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"name": "f", "arguments": {"a": Infinity}}', '{1: 2}', "{'name': 'f', 'arguments': {}}",
        '{"name": "f", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_001,
        '{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}",
    ],
)  # fmt: skip
def test_what_is_no_call_is_not_one_and_raises_nothing(text: str) -> None:
    assert read_call(text, 0, NAMES) is None


@given(st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=4), st.booleans(), st.text(max_size=3))
def test_every_object_is_read_back(arguments: dict[str, object], ascii_only: bool, before: str) -> None:
    text = json.dumps({"name": "g", "arguments": arguments}, ensure_ascii=ascii_only)

    found = read_call(before + text, len(before), NAMES)

    assert found is not None
    assert (json.loads(found[0].arguments), found[1]) == (arguments, len(before) + len(text))


@given(st.text(alphabet='{}[]":,nameargumts fg1\\ ', max_size=60))
def test_any_text_is_a_call_or_none(text: str) -> None:
    found = read_call(text, 0, NAMES)

    assert found is None or isinstance(json.loads(found[0].arguments), dict)


def test_a_whole_value_may_stand_in_white_space() -> None:
    assert whole_value(' \n{"a": 1}\t') == {"a": 1}
    assert whole_value('{"a": 1} x') is None
