"""Prompts of chats; for random conversations the tokens are those of transformers' apply_chat_template."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from engine.errors import InvalidRequest
from engine.request import Request
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.support.fake_engine import LLAMA3_TOKENS, QWEN3_TOKENS, chat_model, served_model, template_source
from tests.support.request_lines import build_request, chat_line, parse, raw_line
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from worker.lines.chat import ChatBody
from worker.records.answers import AnswerFormats
from worker.requests.chat_prompts import ChatPrompts

TOOLS = [{"type": "function", "function": {"name": "weather", "description": None}}]
SPECIAL = {"bos_token": "<b>", "eos_token": "</e>"}

Message = dict[str, Any]

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["hi", " <b>\n", "é'\"", "<think>\na\n</think>\n\nb", "</think>", "<tool_response>x</tool_response>", "<|im_end|>"]
)
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=3)
PARTS = st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), min_size=1, max_size=3)
CONTENT = TEXTS | PARTS

CONVERSATIONS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


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
    for source in (CHAT_TEMPLATE, template_source("turns")):
        error = refusal(source, AnswerFormats("qwen3"), tools=TOOLS)
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


def test_parts_that_a_template_would_drop_are_one_text() -> None:
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    question = {"role": "user", "content": parts}
    turns = prompts(template_source("turns"))

    for role in ("system", "developer"):
        text = turns.text(body(messages=[{"role": role, "content": parts}, question]), 0)
        assert text == (
            "<b><start_of_turn>user\nBe brief.\nBe kind.\n\nBe brief.Be kind.<end_of_turn>\n<start_of_turn>model\n"
        )


def test_a_template_without_a_system_refuses_its_message() -> None:
    gemma2 = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    error = refusal(gemma2, messages=[{"role": "developer", "content": "a"}, {"role": "user", "content": "hi"}])

    assert (error.param, "System role not supported" in str(error)) == ("messages", True)


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


def test_each_set_of_arguments_is_tried_for_whether_reasoning_is_begun() -> None:
    opening = prompts(template_source("parts"))
    switch = prompts(template_source("marked_calls"))

    assert opening.opens_reasoning(body())
    assert opening.opens_reasoning(body(reasoning_effort="low"))
    assert not switch.opens_reasoning(body())
    assert not switch.opens_reasoning(body(tools=TOOLS, chat_template_kwargs={"enable_thinking": False}))


def test_now_is_the_jobs_time_in_utc_whatever_the_workers_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(opening._ends) <= 64


def test_a_template_that_refuses_the_trial_begins_no_reasoning() -> None:
    source = "{% if messages | length == 1 %}{{ raise_exception('no') }}{% endif %}<think></think>"

    assert not prompts(source).opens_reasoning(body())


def test_a_model_without_a_template_reads_no_reasoning() -> None:
    assert not ChatPrompts(None, AnswerFormats()).opens_reasoning(body())


@st.composite
def calls(draw: st.DrawFn) -> list[Message]:
    functions = draw(st.lists(st.tuples(NAMES, OBJECTS), min_size=1, max_size=2))
    return [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(functions)
    ]


@st.composite
def messages(draw: st.DrawFn) -> Message:
    role = draw(st.sampled_from(["user", "assistant", "assistant", "tool", "system"]))
    message: Message = {"role": role, "content": draw(CONTENT)}
    if role == "tool":
        message["tool_call_id"] = "c0"
    if role == "assistant":
        if draw(st.booleans()):
            message["tool_calls"] = draw(calls())
            message["content"] = draw(CONTENT | st.none())
        if draw(st.booleans()):
            message["reasoning_content"] = draw(TEXTS)
    return message


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    first = draw(st.sampled_from([[], [{"role": "system", "content": draw(CONTENT)}]]))
    question = {"role": "user", "content": draw(CONTENT)}
    body: dict[str, Any] = {"messages": [*first, question, *draw(st.lists(messages(), max_size=5))]}
    functions = draw(st.lists(st.tuples(NAMES, TEXTS, OBJECTS), max_size=2, unique_by=lambda function: function[0]))
    if functions:
        body["tools"] = [
            {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
            for name, text, schema in functions
        ]
    return body


@st.composite
def alternating(draw: st.DrawFn) -> list[Message]:
    """What a template of strict turns takes, and now and then what it refuses."""
    first = draw(st.sampled_from([[], [{"role": "system", "content": draw(TEXTS)}]]))
    roles = draw(st.sampled_from([["user", "assistant"] * 2 + ["user"], ["user"], ["user", "user"], ["assistant"]]))
    return [*first, *({"role": role, "content": draw(CONTENT)} for role in roles)]


def by_transformers(theirs: PreTrainedTokenizerFast, body: Mapping[str, Any]) -> str:
    """The prompt; "refused" where the template refuses.

    As their users write it: the arguments of calls are objects, and content is a string where the template wants one.
    """
    conversation = json.loads(json.dumps(body["messages"]))
    for message in conversation:
        if isinstance(message["content"], list) and "part.text" not in theirs.chat_template:
            message["content"] = "\n".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    options = body.get("chat_template_kwargs", {})
    try:
        return str(
            theirs.apply_chat_template(
                conversation, tools=body.get("tools"), add_generation_prompt=True, tokenize=False, **options
            )
        )
    except (TemplateError, TypeError):
        return "refused"


class Both:
    """A checkpoint as read by us and by transformers."""

    def __init__(self, path: Path, template: str, tokens: dict[str, bool]) -> None:
        self.ours: Tokenizer = chat_model(path, template_source(template), tokens)
        self.theirs = PreTrainedTokenizerFast.from_pretrained(path)
        self.builder = served_model(self.ours).requests
        self.num_compared = 0

    def check(self, body: dict[str, Any]) -> None:
        expected = by_transformers(self.theirs, body)
        now_s = int(time.time())  # their templates ask the clock themselves
        line = parse(raw_line(body))
        if expected == "refused":
            with pytest.raises(InvalidRequest) as raised:
                build_request(self.builder, line, created_s=now_s)
            assert raised.value.param == "messages"
            return
        request = build_request(self.builder, line, created_s=now_s)
        assert isinstance(request, Request)
        assert list(request.prompt_token_ids) == self.ours.encode(expected, add_special_tokens=False), expected
        self.num_compared += 1


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(tmp_path_factory.mktemp("marked"), "marked_calls", QWEN3_TOKENS)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(tmp_path_factory.mktemp("bare"), "bare_calls", LLAMA3_TOKENS)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(tmp_path_factory.mktemp("parts"), "parts", {})


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(tmp_path_factory.mktemp("turns"), "turns", {"<start_of_turn>": True, "<end_of_turn>": True})


@given(body=bodies(), thinking=st.sampled_from([None, True, False]))
@CONVERSATIONS
def test_prompts_of_the_qwen3_kind(marked: Both, body: dict[str, Any], thinking: bool | None) -> None:
    options = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    marked.check({**body, **options})


@given(
    body=bodies(),
    options=st.fixed_dictionaries(
        {},
        optional={
            "date_string": TEXTS,
            "tools_in_user_message": st.booleans(),
            "builtin_tools": st.lists(st.sampled_from(["search", "code_interpreter"]), max_size=2),
        },
    ),
)
@CONVERSATIONS
def test_prompts_of_the_llama_3_kind(bare: Both, body: dict[str, Any], options: dict[str, Any]) -> None:
    bare.check({**body, "chat_template_kwargs": options})


@given(body=bodies().map(lambda body: {"messages": body["messages"]}), effort=st.sampled_from(["low", "high"]))
@CONVERSATIONS
def test_prompts_of_a_template_that_reads_parts(parts: Both, body: dict[str, Any], effort: str) -> None:
    parts.check({**body, "chat_template_kwargs": {"reasoning_effort": effort}})


@given(messages=alternating())
@CONVERSATIONS
def test_prompts_of_the_gemma_kind(turns: Both, messages: list[Message]) -> None:
    turns.check({"messages": messages})


def test_most_of_the_conversations_were_compared_and_not_refused(
    marked: Both, bare: Both, parts: Both, turns: Both
) -> None:
    fixed = {"messages": [{"role": "user", "content": "hi"}]}
    for both in (marked, bare, parts, turns):
        both.check(fixed)
        assert both.num_compared > 0
