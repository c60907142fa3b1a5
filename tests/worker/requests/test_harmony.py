"""Answers in channels, as gpt-oss writes them: read, written again by a template, and held to by grammars."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from tests.support.fake_engine import answered, template_source
from tests.support.request_lines import chat_line, parse
from tests.worker.requests.test_answers import Model as Reading
from tests.worker.requests.test_call_grammar import NAMED, STRICT, TIME, WEATHER
from tests.worker.requests.test_call_grammar import Model as Writing
from worker.lines.chat import ChatBody
from worker.records.answers import AnswerFormats, ChatAnswer
from worker.records.harmony import HARMONY_MARKS, read_channels
from worker.records.tool_calls import CalledTool

SPECIAL, TEXT = dict.fromkeys(sorted(HARMONY_MARKS), True), dict.fromkeys(sorted(HARMONY_MARKS), False)
THOUGHT = "<|channel|>analysis<|message|>Rome, then.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
ROME = CalledTool("weather", '{"city": "Rome"}')
TOOLS = {"weather": None, "time": None}


@pytest.fixture(scope="module", params=[SPECIAL, TEXT], ids=["special tokens", "text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reading:
    path = tmp_path_factory.mktemp("channels")
    return Reading(path, template_source("channels"), request.param, AnswerFormats())


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Writing:
    return Writing(tmp_path_factory.mktemp("writing"), template_source("channels"), SPECIAL)


def test_the_template_shows_the_format(model: Reading) -> None:
    assert model.prompts.formats == AnswerFormats("harmony", "harmony")


def test_channels_are_reasoning_content_and_calls(model: Reading) -> None:
    count = model.num_tokens(THOUGHT)
    assert model.read(f"{THOUGHT}{NEXT}{FINAL}Sunny.") == ChatAnswer("Sunny.", (), "Rome, then.", count)
    assert model.read(f"{FINAL}Sunny.") == ChatAnswer("Sunny.", (), None, 0)
    assert model.read(f"{THOUGHT}{NEXT}{CALL}") == ChatAnswer(None, (ROME,), "Rome, then.", count)
    preamble = "<|channel|>commentary<|message|>I look.<|end|>"
    assert model.read(f"{THOUGHT}{NEXT}{preamble}{NEXT}{CALL}") == ChatAnswer("I look.", (ROME,), "Rome, then.", count)
    two = f"{CALL}<|end|>{NEXT}{CALL.replace('weather', 'time').replace('Rome', 'Oslo')}"
    assert model.read(two).calls == (ROME, CalledTool("time", '{"city": "Oslo"}'))
    assert model.read(two, parallel_tool_calls=False).calls == (ROME,)


def test_what_was_cut_is_kept(model: Reading) -> None:
    cut = "<|channel|>analysis<|message|>Rome, th"
    assert model.read(cut) == ChatAnswer("", (), "Rome, th", model.num_tokens(cut))
    assert model.read(f"{THOUGHT}{NEXT}").content == ""
    assert model.read(f"{THOUGHT}{NEXT}{FINAL}Sun").content == "Sun"
    assert model.read("no channel").content == "no channel"


def test_what_the_operator_wants_no_part_of_stays_content(tmp_path: Path) -> None:
    plain = Reading(tmp_path / "a", template_source("channels"), SPECIAL, AnswerFormats("harmony", "none"))
    expected = ChatAnswer("Rome, then.\n\nSunny.", (), None, None)
    assert plain.read(f"{THOUGHT}{NEXT}{FINAL}Sunny.") == expected
    uncalled = Reading(tmp_path / "b", template_source("channels"), SPECIAL, AnswerFormats("none", "harmony"))
    assert uncalled.read(CALL) == ChatAnswer('{"city": "Rome"}', (), None, 0)


@pytest.mark.parametrize(
    "call",
    [
        CALL.replace("weather", "other"),
        CALL.replace("}", ""),
        CALL.replace('{"city": "Rome"}', "[1]"),
        CALL + CALL[len(CALL) - 1 :],
    ],
)
def test_a_call_that_cannot_be_read_makes_all_calls_text(call: str) -> None:
    found = read_channels(f"{CALL}<|end|>{NEXT}{call}", TOOLS)
    assert found is not None
    assert found.calls == ()
    assert '{"city": "Rome"}' in found.content


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.weather<|channel|>commentary json",
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        "<|channel|>commentary to=functions.weather",
        "<|channel|>analysis to=functions.weather code",
    ],
)
def test_a_call_is_read_wherever_its_header_names_the_function(header: str) -> None:
    found = read_channels(f'{header}<|message|>{{"city": "Rome"}}<|call|>', TOOLS)
    assert found is not None
    assert found.calls == (ROME,)


def test_an_answer_that_is_read_is_written_again_as_it_was(model: Reading) -> None:
    answer = f"{THOUGHT}{NEXT}{CALL}"
    read = model.read(answered(model.tokenizer, answer))
    (call,) = read.calls
    written = {
        "role": "assistant",
        "reasoning_content": read.reasoning,
        "tool_calls": [{"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}],
    }
    template = model.tokenizer.chat_template
    assert template is not None
    question = {"role": "user", "content": "Weather?"}
    now = datetime.fromtimestamp(0, UTC)
    prompt = template.render([question], now, tools=[WEATHER])
    assert template.render([question, written], now, tools=[WEATHER]) == f"{prompt}{answer}<|call|>{NEXT}"


def test_the_effort_is_the_templates(model: Reading) -> None:
    body = parse(chat_line(reasoning_effort="high")).body
    assert isinstance(body, ChatBody)
    assert "Reasoning: high" in model.prompts.text(body, 0)


def test_required_calls_keep_to_their_schema_behind_reasoning(writing: Writing) -> None:
    required: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": "required"}
    for answer in (CALL, f"{THOUGHT}{NEXT}{CALL}"):
        assert writing.takes(answer, **required), answer
    for answer in ("", f"{FINAL}Sunny.", CALL.replace("Rome", "Paris"), f"{CALL}Sunny.", f"{THOUGHT}{CALL}"):
        assert not writing.takes(answer, **required), answer
    now = "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}"
    assert writing.takes(now, **required)
    assert not writing.takes(now, tools=[TIME, WEATHER], tool_choice=NAMED)


def test_strict_functions_are_called_or_not(writing: Writing) -> None:
    strict = {"tools": [STRICT, TIME]}
    for answer in (CALL, f"{FINAL}Sunny.", f"{THOUGHT}{NEXT}{FINAL}Sunny."):
        assert writing.takes(answer, **strict), answer
    assert not writing.takes(CALL.replace("Rome", "Paris"), **strict)


def test_a_form_is_that_of_the_final_message(writing: Writing) -> None:
    shape = {"response_format": {"type": "json_object"}}
    for answer in (f'{FINAL}{{"a": 1}}', f'{THOUGHT}{NEXT}{FINAL}{{"a": 1}}'):
        assert writing.takes(answer, **shape), answer
        assert writing.takes(answer, **shape, tools=[WEATHER]), answer
    assert writing.takes(CALL, **shape, tools=[WEATHER])
    for answer in ('{"a": 1}', f"{FINAL}Sunny.", CALL):
        assert not writing.takes(answer, **shape), answer


def test_a_grammar_beside_tools_is_refused(writing: Writing) -> None:
    with pytest.raises(InvalidRequest):
        writing.grammar(guided_grammar="start: /a/", tools=[WEATHER])
