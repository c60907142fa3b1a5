from __future__ import annotations

import time

import pytest

from engine.errors import InvalidRequest
from engine.text.chat_template import ChatTemplate
from tests.support.chat_models import template_source
from tests.support.request_lines import chat_line, parse
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from worker.lines.chat import ChatBody
from worker.records.answers import AnswerFormats
from worker.requests.chat_prompts import ChatPrompts

TOOLS = [{"type": "function", "function": {"name": "weather", "description": None}}]
SPECIAL = {"bos_token": "<b>", "eos_token": "</e>"}


def prompts(source: str, formats: AnswerFormats | None = None) -> ChatPrompts:
    return ChatPrompts(ChatTemplate({"default": source}, SPECIAL), formats or AnswerFormats())


def body(**parameters: object) -> ChatBody:
    found = parse(chat_line(**parameters)).body
    assert isinstance(found, ChatBody)
    return found


def refusal(source: str, formats: AnswerFormats | None = None, /, **parameters: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        prompts(source, formats).text(body(**parameters), 0)
    return raised.value


def test_tools_reach_the_template_as_the_line_had_them() -> None:
    text = prompts(template_source("marked_calls")).text(body(tools=TOOLS), 0)

    assert '{"type": "function", "function": {"name": "weather", "description": null}}' in text


def test_a_tool_choice_of_none_keeps_the_tools_from_the_model() -> None:
    source = template_source("marked_calls")

    assert prompts(source).text(body(tools=TOOLS, tool_choice="none"), 0) == prompts(source).text(body(), 0)


def test_tools_are_refused_where_the_template_does_not_show_them() -> None:
    error = refusal(CHAT_TEMPLATE, AnswerFormats("qwen3"), tools=TOOLS)

    assert (error.param, "does not show them" in str(error)) == ("tools", True)


def test_tools_are_refused_where_calls_could_not_be_read() -> None:
    source = "{{ tools | tojson }}"

    assert "model.tool_call_format" in str(refusal(source, tools=TOOLS))
    assert prompts(source, AnswerFormats("none")).text(body(tools=TOOLS), 0).startswith("[")


@pytest.mark.parametrize(
    ("template", "shown"), [("marked_calls", "<|im_start|>system\nBrief."), ("bare_calls", "Brief.<|eot_id|>")]
)
def test_a_developer_is_the_system_where_the_template_has_no_such_word(template: str, shown: str) -> None:
    messages = [{"role": "developer", "content": "Brief."}, {"role": "user", "content": "hi"}]

    text = prompts(template_source(template)).text(body(messages=messages), 0)

    assert shown in text
    assert "developer" not in text


def test_a_developer_stays_one_where_the_template_knows_the_word() -> None:
    messages = [{"role": "developer", "content": "Brief."}, {"role": "user", "content": "hi"}]

    text = prompts(template_source("parts")).text(body(messages=messages), 0)

    assert text.startswith("[developer]Brief.[user]hi")


def test_text_parts_stay_parts_for_a_template_that_reads_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]

    assert "[user]onetwo[" in prompts(template_source("parts")).text(body(messages=messages), 0)
    assert "user\none\ntwo<|im_end|>" in prompts(template_source("marked_calls")).text(body(messages=messages), 0)


def test_an_effort_is_the_templates_own_or_turns_thinking_off() -> None:
    assert "[assistant low]" in prompts(template_source("parts")).text(body(reasoning_effort="low"), 0)
    switch = prompts(template_source("marked_calls"))
    off = body(chat_template_kwargs={"enable_thinking": False})
    assert switch.text(body(reasoning_effort="none"), 0) == switch.text(off, 0)


@pytest.mark.parametrize(
    ("template", "parameters", "named"),
    [
        ("marked_calls", {"reasoning_effort": "high"}, "only switches thinking on and off"),
        ("bare_calls", {"reasoning_effort": "none"}, "reads no such thing"),
        (
            "marked_calls",
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs sets enable_thinking too",
        ),
    ],
)
def test_an_effort_that_would_be_ignored_is_refused(template: str, parameters: dict[str, object], named: str) -> None:
    error = refusal(template_source(template), **parameters)

    assert (error.param, named in str(error)) == ("reasoning_effort", True)


def test_whether_the_prompt_begins_the_reasoning_is_tried_for_each_set_of_arguments() -> None:
    opening = prompts(template_source("parts"))
    switch = prompts(template_source("marked_calls"))

    assert opening.opens_reasoning(body())
    assert opening.opens_reasoning(body(reasoning_effort="low"))
    assert not switch.opens_reasoning(body())
    assert not switch.opens_reasoning(body(tools=TOOLS, chat_template_kwargs={"enable_thinking": False}))


def test_now_is_the_jobs_time_in_utc_wherever_the_clock_of_the_worker_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")  # 14 hours ahead
    time.tzset()
    try:
        shown = prompts("{{ strftime_now('%d %b %Y %H:%M') }}").text(body(), 1_700_000_000)
    finally:
        monkeypatch.undo()
        time.tzset()

    assert shown == "14 Nov 2023 22:13"


def test_what_is_remembered_of_arguments_is_bounded() -> None:
    opening = prompts(template_source("parts"))

    assert all(opening.opens_reasoning(body(chat_template_kwargs={"reasoning_effort": n})) for n in range(200))
    assert len(opening._opens) <= 64


def test_a_template_that_refuses_the_trial_begins_no_reasoning() -> None:
    source = "{% if messages | length == 1 %}{{ raise_exception('no') }}{% endif %}<think></think>"

    assert not prompts(source).opens_reasoning(body())


def test_a_model_without_a_template_reads_no_reasoning() -> None:
    assert not ChatPrompts(None, AnswerFormats()).opens_reasoning(body())
