from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.records.answers import AnswerFormats, CalledTool, read_calls

QWEN3 = AnswerFormats("qwen3", "qwen3")
LLAMA3 = AnswerFormats("llama3", "none")
NAMES = {"weather", "time"}
WEATHER = CalledTool("weather", '{"city": "Rome"}')
TIME = CalledTool("time", "{}")
MARKED_WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MARKED_TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
BARE_WEATHER = '{"name": "weather", "parameters": {"city": "Rome"}}'
BARE_TIME = '{"name": "time", "parameters": {}}'


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


PIECES = st.sampled_from(
    [MARKED_WEATHER, MARKED_TIME, BARE_TIME, "<tool_call>", "</tool_call>", "<|python_tag|>", "{", "}", ";", "x", "\n"]
)


@given(st.lists(PIECES, max_size=8), st.sampled_from([QWEN3, LLAMA3]), st.integers(0, 40))
def test_whatever_the_answer_reading_it_raises_nothing(pieces: list[str], formats: AnswerFormats, cut: int) -> None:
    text = "".join(pieces)
    found = read_calls(text[: len(text) - cut], formats, NAMES)

    assert found is None or found[0]
