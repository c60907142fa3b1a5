"""Tool calls in the text of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings import ToolCallFormat
from worker.records.tool_calls import MARKS, CalledTool, Read, argument_types, read_call, read_calls, whole_value

FUNCTION_NAMES = {"f", "g"}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


NAMES = {"f", "g"}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Days": {"type": "integer"}},
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/Days"},
        "exact": {"type": "boolean"},
        "scale": {"type": "number"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "places": {"type": "array", "items": {"type": "string"}},
        "limit": {"enum": [1, 2, None]},
    },
}
TOOLS = {"weather": SCHEMA, "time": None}
WEATHER = CalledTool("weather", '{"city": "Rome"}')
TIME = CalledTool("time", "{}")
MARKED_WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MARKED_TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
BARE_WEATHER = '{"name": "weather", "parameters": {"city": "Rome"}}'
BARE_TIME = '{"name": "time", "parameters": {}}'

PIECES = st.sampled_from(
    [MARKED_WEATHER, MARKED_TIME, BARE_TIME, "<tool_call>", "</tool_call>", "<|python_tag|>", "{", "}", ";", "x", "\n"]
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
    assert read_call(text + " rest", 0, FUNCTION_NAMES) == (CalledTool("f", arguments), len(text))


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
    assert read_call(text, 0, FUNCTION_NAMES) is None


@given(st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=4), st.booleans(), st.text(max_size=3))
def test_every_object_is_read_back(arguments: dict[str, object], ascii_only: bool, before: str) -> None:
    text = json.dumps({"name": "g", "arguments": arguments}, ensure_ascii=ascii_only)

    found = read_call(before + text, len(before), FUNCTION_NAMES)

    assert found is not None
    assert (json.loads(found[0].arguments), found[1]) == (arguments, len(before) + len(text))


@given(st.text(alphabet='{}[]":,nameargumts fg1\\ ', max_size=60))
def test_any_text_is_a_call_or_none(text: str) -> None:
    found = read_call(text, 0, FUNCTION_NAMES)

    assert found is None or isinstance(json.loads(found[0].arguments), dict)


def test_a_whole_value_may_stand_in_white_space() -> None:
    assert whole_value(' \n{"a": 1}\t') == {"a": 1}
    assert whole_value('{"a": 1} x') is None


@pytest.mark.parametrize(
    ("text", "calls", "beside"),
    [
        (MARKED_WEATHER, (WEATHER,), ""),
        (f"{MARKED_WEATHER}\n{MARKED_TIME}", (WEATHER, TIME), ""),
        (f"I look.\n{MARKED_TIME}\n", (TIME,), "I look."),
        (f"One {MARKED_TIME} two {MARKED_WEATHER}", (TIME, WEATHER), "One  two"),
        ('<tool_call>\n{"name": "time", "arguments": {}}\n', (TIME,), ""),
        (f'{MARKED_WEATHER}<tool_call>{{"name": "time", "arguments": {{}}}}', (WEATHER, TIME), ""),
    ],
)
def test_marked_calls_are_read(text: str, calls: tuple[CalledTool, ...], beside: str) -> None:
    assert read_calls(text, "qwen3", TOOLS) == (calls, beside)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It is sunny.",
        BARE_WEATHER,
        '<tool_call>\n{"name": "weather", "arg',
        '<tool_call>\n{"name": "elsewhere", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "time", "arguments": {}} and more</tool_call>',
        "<tool_call>\n<function=time>\n</function>\n</tool_call>",
        f'{MARKED_WEATHER}\n<tool_call>\n{{"name": "time"',
        "<tool_call>",
        "</tool_call>",
    ],
)
def test_an_answer_with_a_marked_call_that_cannot_be_read_stays_text(text: str) -> None:
    assert read_calls(text, "qwen3", TOOLS) is None


@pytest.mark.parametrize(
    ("text", "calls", "beside"),
    [
        (BARE_WEATHER, (WEATHER,), ""),
        (f"\n {BARE_TIME}\n", (TIME,), ""),
        (f"<|python_tag|>{BARE_WEATHER}", (WEATHER,), ""),
        (f"Let me see. <|python_tag|>{BARE_WEATHER}", (WEATHER,), "Let me see."),
        (f"{BARE_WEATHER}; {BARE_TIME}", (WEATHER, TIME), ""),
        (f"{BARE_WEATHER}\n{BARE_TIME};", (WEATHER, TIME), ""),
    ],
)
def test_bare_calls_are_read(text: str, calls: tuple[CalledTool, ...], beside: str) -> None:
    assert read_calls(text, "llama3", TOOLS) == (calls, beside)


@pytest.mark.parametrize(
    "text",
    [
        "", "It is sunny.", f"The call is {BARE_WEATHER}", f"{BARE_WEATHER} is the call", f"; {BARE_WEATHER}",
        '{"name": "Rome", "parameters": {"people": 3}}', '{"city": "Rome"}', "<|python_tag|>",
        '<|python_tag|>weather.call(city="Rome")', BARE_WEATHER[:-1],
    ],
)  # fmt: skip
def test_an_answer_that_is_not_all_calls_stays_text(text: str) -> None:
    assert read_calls(text, "llama3", TOOLS) is None


def test_without_a_format_nothing_is_read() -> None:
    assert read_calls(MARKED_WEATHER, "none", TOOLS) is None
    assert read_calls(BARE_WEATHER, "auto", TOOLS) is None


LISTED = '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}}]'


@pytest.mark.parametrize(
    ("written", "text", "calls", "beside"),
    [
        ("mistral", f"[TOOL_CALLS]{LISTED}", (WEATHER, TIME), ""),
        ("mistral", f"[TOOL_CALLS] {LISTED}\n", (WEATHER, TIME), ""),
        ("mistral", 'I look.[TOOL_CALLS][{"name": "time", "arguments": {}, "id": "a1B2c3D4e"}]', (TIME,), "I look."),
        ("mistral", "[TOOL_CALLS]time[ARGS]{}", (TIME,), ""),
        ("mistral_v11", f"[TOOL_CALLS]{LISTED}", (WEATHER, TIME), ""),
        ("mistral_v11", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time[ARGS]{}', (WEATHER, TIME), ""),
        ("mistral_v11", 'So:[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Rome"}', (WEATHER,), "So:"),
        ("mistral_v11", '[TOOL_CALLS]weather{"city": "Rome"}', (WEATHER,), ""),
        ("granite", f"<|tool_call|>{LISTED}", (WEATHER, TIME), ""),
        ("granite", f"I look. <|tool_call|> {LISTED}<|/tool_call|>", (WEATHER, TIME), "I look."),
        ("granite", f"<tool_call>{LISTED}", (WEATHER, TIME), ""),
    ],
)
def test_calls_behind_one_mark_are_read(
    written: ToolCallFormat, text: str, calls: tuple[CalledTool, ...], beside: str
) -> None:
    assert read_calls(text, written, TOOLS) == (calls, beside)


@pytest.mark.parametrize("written", ["mistral", "mistral_v11", "granite"])
@pytest.mark.parametrize(
    "behind",
    [
        "", "[]", "It is sunny.", LISTED[:-1], f"{LISTED}]", f"{LISTED} and more", f"{LISTED[:-1]},]", "[,]",
        '[{"name": "elsewhere", "arguments": {}}]', '[{"name": "time", "arguments": 3}]', '{"name": "time"}',
        "elsewhere[ARGS]{}", "time[ARGS]", "time[ARGS]{", "time[ARGS][]", "time[ARGS]{} and more", "[ARGS]{}",
    ],
)  # fmt: skip
def test_what_is_no_call_behind_a_mark_stays_text(written: ToolCallFormat, behind: str) -> None:
    mark = "<|tool_call|>" if written == "granite" else "[TOOL_CALLS]"
    assert read_calls(mark + behind, written, TOOLS) is None
    assert read_calls(behind, written, TOOLS) is None


def _xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("city", "Rome", "Rome"), ("city", "12", "12"), ("city", "null", "null"), ("city", '"Rome"', '"Rome"'),
        ("city", " two\n\nlines ", " two\n\nlines "), ("city", "\nlines\n", "\nlines\n"),
        ("city", "", ""), ("city", "<b>&amp;", "<b>&amp;"),
        ("days", "3", 3), ("days", " 3 ", 3), ("days", "three", "three"), ("days", "3.5", "3.5"),
        ("scale", "3", 3), ("scale", "0.5", 0.5), ("exact", "true", True), ("exact", "False", False),
        ("unit", "C", "C"), ("unit", "null", None), ("unit", "None", None), ("unit", "7", "7"),
        ("places", '["a", "b"]', ["a", "b"]), ("places", "a, b", "a, b"), ("limit", "2", 2), ("limit", "null", None),
        ("unheard", "12", "12"),
    ],
)  # fmt: skip
def test_an_argument_in_xml_is_what_its_schema_says(key: str, value: str, read: object) -> None:
    found = read_calls(_xml("weather", **{key: value}), "qwen3_coder", TOOLS)
    assert found is not None
    assert json.loads(found[0][0].arguments) == {key: read}


def test_calls_in_xml_are_read() -> None:
    both = f"So:\n{_xml('weather', city='Rome', days='2')}\n{_xml('time')}"
    calls = (CalledTool("weather", '{"city": "Rome", "days": 2}'), CalledTool("time", "{}"))
    assert read_calls(both, "qwen3_coder", TOOLS) == (calls, "So:")
    assert read_calls(_xml("time").removesuffix("</tool_call>"), "qwen3_coder", TOOLS) == ((TIME,), "")
    assert read_calls(_xml("time").replace("\n", ""), "qwen3_coder", TOOLS) == ((TIME,), "")


@pytest.mark.parametrize(
    "text",
    [
        "", "It is sunny.", "<tool_call>", MARKED_TIME, _xml("elsewhere"), _xml("time").replace("</function>", ""),
        _xml("weather", city="Rome").replace("</parameter>", ""), _xml("time").replace("time>", "time"),
        _xml("weather", city="Rome").replace("</function>", "<parameter=city>Oslo</parameter></function>"),
        f"{_xml('time')}<tool_call><function=ti", _xml("time").replace("</function>", "</function> more"),
        _xml("time").partition("</function>")[0], _xml("weather", city="Rome").partition("</function>")[0],
    ],
)  # fmt: skip
def test_what_is_no_call_in_xml_stays_text(text: str) -> None:
    assert read_calls(text, "qwen3_coder", TOOLS) is None


@pytest.mark.parametrize(
    "given",
    [None, {}, {"properties": []}, {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}],
)
def test_a_schema_without_types_says_nothing(given: dict[str, object] | None) -> None:
    assert argument_types(given, "a") == set()


@pytest.mark.parametrize(
    ("written", "text", "calls", "beside"),
    [
        ("pythonic", '[weather(city="Rome"), time()]', (WEATHER, TIME), ""),
        ("pythonic", "\n [weather( city = 'Rome' ,),]\n", (WEATHER,), ""),
        ("pythonic", "So:<|python_tag|>[time()]", (TIME,), "So:"),
        ("olmo3", '<function_calls>weather(city="Rome")\ntime()</function_calls>', (WEATHER, TIME), ""),
        ("olmo3", "So:\n<function_calls>\n time()\n", (TIME,), "So:"),
        ("olmo3", "<function_calls>time()</function_calls> then", (TIME,), "then"),
    ],
)
def test_calls_as_python_writes_them_are_read(
    written: ToolCallFormat, text: str, calls: tuple[CalledTool, ...], beside: str
) -> None:
    assert read_calls(text, written, TOOLS) == (calls, beside)


@pytest.mark.parametrize(
    ("spelled", "value"),
    [
        ("True", True), ("None", None), ("null", None), ("false", False), ("-1.5e3", -1500.0), ("0", 0), ("''", ""),
        (r"'it\'s \"so\"'", "it's \"so\""), (r'"a\nb\/\u00e9\x41\d"', "a\nb/éA\\d"), (r'"\ud83d\ude00"', "\U0001f600"),
        ("'a\nb'", "a\nb"), ("'), time('", "), time("),
        ("[1, [2,], {}]", [1, [2], {}]), ("{'a': {'b': [None]}}", {"a": {"b": [None]}}),
    ],
)  # fmt: skip
def test_values_of_python_are_those_of_json(spelled: str, value: object) -> None:
    found = read_calls(f"[weather(a={spelled}, b={spelled})]", "pythonic", TOOLS)
    assert found is not None
    assert json.loads(found[0][0].arguments) == {"a": value, "b": value}


@pytest.mark.parametrize(
    "call",
    [
        "", "time", "time(", "time()(", "elsewhere()", "weather('Rome')", "weather(city=)", "weather(city=Rome)",
        "weather(city='Rome)", "weather(city='Rome' 'Oslo')", "weather(a=1, a=2)", "weather(a=01)", "weather(a=1 b=2)",
        "weather(a=[1)", "weather(a={1: 2})", "weather(a={'b'})", "weather(a=nan)", "weather(a=-)", "weather(a=Truer)",
        r"weather(a='\ud800')", r"weather(a='\Uffffffff')", "weather(a=" + "[" * 100_000, "weather(=1)",
        "time() and more",
    ],
)  # fmt: skip
def test_what_is_no_call_of_python_stays_text(call: str) -> None:
    assert read_calls(f"[{call}]", "pythonic", TOOLS) is None
    assert read_calls(f"<function_calls>{call}</function_calls>", "olmo3", TOOLS) is None
    assert read_calls(f"[{call}", "pythonic", TOOLS) is None


@given(
    st.dictionaries(st.from_regex(r"[a-z_]\w{0,4}", fullmatch=True), JSON_VALUES, max_size=4),
    st.sampled_from([repr, json.dumps]),
    st.sampled_from([("pythonic", "[{}]"), ("olmo3", "<function_calls>{}</function_calls>")]),
)
def test_every_call_of_python_is_read_back(
    arguments: dict[str, object], spell: Callable[[object], str], form: tuple[ToolCallFormat, str]
) -> None:
    written, frame = form
    given = ", ".join(f"{key}={spell(value)}" for key, value in arguments.items())
    found = read_calls(frame.format(f"weather({given})"), written, TOOLS)
    assert found is not None
    assert json.loads(found[0][0].arguments) == arguments


XML_PIECES = [_xml("weather", city="Rome"), _xml("time"), "<function=time>", "<parameter=city>", "</parameter>"]
PYTHON_PIECES = ["[weather(", "city='", '"', ")", "<function_calls>", "</function_calls>", "=", "time()"]
MARK_PIECES = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", LISTED, "time", "[", "]", ","]


@given(
    st.lists(st.one_of(PIECES, st.sampled_from(XML_PIECES + MARK_PIECES + PYTHON_PIECES)), max_size=8),
    st.sampled_from(sorted(MARKS)),
    st.integers(0, 40),
)
def test_whatever_the_answer_reading_it_raises_nothing(pieces: list[str], written: ToolCallFormat, cut: int) -> None:
    text = "".join(pieces)
    found: Read | None = read_calls(text[: len(text) - cut], written, TOOLS)

    assert found is None or found[0]
    assert found is None or all(isinstance(json.loads(call.arguments), dict) for call in found[0])
