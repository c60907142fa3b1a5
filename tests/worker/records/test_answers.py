"""Reasoning and tool calls in the text of an answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.chat_template import ChatTemplate
from tests.support.fake_engine import template_source
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from worker.records.answers import AnswerFormats, CalledTool, read_call, read_calls, split_reasoning, whole_value

SPECIAL = {"bos_token": "<b>", "eos_token": "</e>"}

FUNCTION_NAMES = {"f", "g"}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)

QWEN3 = AnswerFormats("qwen3", "qwen3")
LLAMA3 = AnswerFormats("llama3", "none")
NAMES = {"weather", "time"}
WEATHER = CalledTool("weather", '{"city": "Rome"}')
TIME = CalledTool("time", "{}")
MARKED_WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MARKED_TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
BARE_WEATHER = '{"name": "weather", "parameters": {"city": "Rome"}}'
BARE_TIME = '{"name": "time", "parameters": {}}'

PIECES = st.sampled_from(
    [MARKED_WEATHER, MARKED_TIME, BARE_TIME, "<tool_call>", "</tool_call>", "<|python_tag|>", "{", "}", ";", "x", "\n"]
)


def shown_by(source: str, formats: AnswerFormats | None = None) -> AnswerFormats:
    return (formats or AnswerFormats()).for_template(ChatTemplate({"default": source}, SPECIAL).writes)


@pytest.mark.parametrize(
    ("source", "tool_calls", "reasoning"),
    [
        (template_source("marked_calls"), "qwen3", "qwen3"),
        (template_source("bare_calls"), "llama3", "none"),
        (CHAT_TEMPLATE, "auto", "none"),
        ("{{ '<tool_call>\\n<function=' }}", "auto", "none"),
        ('{{ "{\\"name\\": 1, \\"parameters\\": " }}<|start_header_id|>', "llama3", "none"),
        ("{# <tool_call> </think> #}", "auto", "none"),
    ],
    ids=["qwen3", "llama3", "plain", "xml calls", "escaped quotes", "only in a comment"],
)
def test_the_template_shows_the_formats(source: str, tool_calls: str, reasoning: str) -> None:
    assert shown_by(source) == AnswerFormats(tool_calls, reasoning)  # type: ignore[arg-type]  # literals


def test_what_the_operator_chose_stays() -> None:
    assert shown_by(template_source("marked_calls"), AnswerFormats("none", "none")) == AnswerFormats("none", "none")
    assert shown_by(CHAT_TEMPLATE, AnswerFormats("llama3", "qwen3")) == AnswerFormats("llama3", "qwen3")


def test_marks_are_those_of_the_formats_at_hand() -> None:
    assert AnswerFormats("qwen3", "none").marks == {"<tool_call>", "</tool_call>"}
    assert AnswerFormats("llama3", "qwen3").marks == {"<|python_tag|>", "<think>", "</think>"}
    assert not AnswerFormats("none", "none").marks
    assert not AnswerFormats().marks


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nsum\n</think>\n\n4", "sum", "\n\n4"),
        ("<think>sum</think>4", "sum", "4"),
        ("<think>\n\n</think>\n\n4", "", "\n\n4"),
        ("\n <think>a\n\nb</think>4 </think> 5", "a\n\nb", "4 </think> 5"),
        ("<think>\nI was cut", "I was cut", ""),
        ("<think>", "", ""),
    ],
)
def test_what_stands_between_the_marks_is_reasoning(text: str, reasoning: str, answer: str) -> None:
    found = split_reasoning(text, opened=False)

    assert found is not None
    assert (found[0], text[found[1] :]) == (reasoning, answer)
    assert split_reasoning(text, opened=True) == found


@pytest.mark.parametrize("text", ["", "4", "4 <think>no</think>", "sum\n</think>\n\n4", "<thin", "</think>4"])
def test_an_answer_that_does_not_begin_with_reasoning_has_none(text: str) -> None:
    assert split_reasoning(text, opened=False) is None


def test_where_the_prompt_has_begun_it_the_answer_begins_inside() -> None:
    assert split_reasoning("sum\n</think>\n\n4", opened=True) == ("sum", 12)
    assert split_reasoning("I was cut", opened=True) == ("I was cut", 9)
    assert split_reasoning("</think>4", opened=True) == ("", 8)


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
    assert read_calls(text, QWEN3, NAMES) == (calls, beside)


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
    assert read_calls(text, QWEN3, NAMES) is None


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
    assert read_calls(text, LLAMA3, NAMES) == (calls, beside)


@pytest.mark.parametrize(
    "text",
    [
        "", "It is sunny.", f"The call is {BARE_WEATHER}", f"{BARE_WEATHER} is the call", f"; {BARE_WEATHER}",
        '{"name": "Rome", "parameters": {"people": 3}}', '{"city": "Rome"}', "<|python_tag|>",
        '<|python_tag|>weather.call(city="Rome")', BARE_WEATHER[:-1],
    ],
)  # fmt: skip
def test_an_answer_that_is_not_all_calls_stays_text(text: str) -> None:
    assert read_calls(text, LLAMA3, NAMES) is None


def test_without_a_format_nothing_is_read() -> None:
    assert read_calls(MARKED_WEATHER, AnswerFormats("none", "none"), NAMES) is None
    assert read_calls(BARE_WEATHER, AnswerFormats("auto", "none"), NAMES) is None


@given(st.lists(PIECES, max_size=8), st.sampled_from([QWEN3, LLAMA3]), st.integers(0, 40))
def test_whatever_the_answer_reading_it_raises_nothing(pieces: list[str], formats: AnswerFormats, cut: int) -> None:
    text = "".join(pieces)
    found = read_calls(text[: len(text) - cut], formats, NAMES)

    assert found is None or found[0]
