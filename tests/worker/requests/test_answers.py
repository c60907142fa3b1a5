"""From an engine's output to the message of an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.request import Completion, FinishReason
from settings import ToolCallFormat
from tests.support.fake_engine import HERMES_TOKENS, LLAMA3_TOKENS, QWEN3_TOKENS, answered, chat_model, template_source
from tests.support.request_lines import chat_line, parse
from worker.lines.chat import ChatBody
from worker.records.answers import AnswerFormats, ChatAnswer
from worker.records.success import answer_message
from worker.records.tool_calls import CalledTool
from worker.requests.answers import AnswerReader, TokenText
from worker.requests.chat_prompts import ChatPrompts

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
MARKED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MARKED_TWO = MARKED + '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
BARE = '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}'
WEATHER = CalledTool("weather", '{"city": "Rome"}')
TIME = CalledTool("time", "{}")

EACH = "{% for call in m.tool_calls %}{% set f = call.function %}"
NEXT = "{{ ', ' if not loop.last }}{% endfor %}"
LISTED = EACH + "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}" + NEXT
PYTHON = EACH + "{{ f.name }}({% for key, value in f.arguments.items() %}{{ key }}={{ value | tojson }}" + NEXT + ")"
XML = "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n"
# Format -> how a template writes the calls of an answer `m`, and the calls of WEATHER and TIME so written.
WRITTEN: dict[ToolCallFormat, tuple[str, str]] = {
    "qwen3_coder": (
        EACH
        + "<tool_call>\n<function={{ f.name }}>\n{% for key, value in f.arguments.items() %}"
        + XML
        + "{% endfor %}"
        "</function>\n</tool_call>{{ '\n' if not loop.last }}{% endfor %}",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    ),
    "mistral": (
        f"[TOOL_CALLS][{LISTED}]",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}}]',
    ),
    "mistral_v11": (
        EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time[ARGS]{}',
    ),
    "granite": (
        f"<|tool_call|>[{LISTED}]",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}}]',
    ),
    "pythonic": (f"{{# [func_name1( #}}{{{{ '[' }}}}{PYTHON}{NEXT}]", '[weather(city="Rome"), time()]'),
    "olmo3": (
        f"<function_calls>{PYTHON}{{{{ '\n' if not loop.last }}}}{{% endfor %}}</function_calls>",
        '<function_calls>weather(city="Rome")\ntime()</function_calls>',
    ),
}

MARKS = {"plain marks": QWEN3_TOKENS, "special marks": HERMES_TOKENS, "no mark tokens": {}}
TAGS = {"special tag": LLAMA3_TOKENS, "no tag token": {}}


class Model:
    """A tokenizer with a template, and the reader of its answers."""

    def __init__(self, path: Path, template: str, tokens: dict[str, bool], formats: AnswerFormats) -> None:
        self.tokenizer = chat_model(path, template, tokens)
        self.prompts = ChatPrompts(self.tokenizer.chat_template, formats)
        self.reader = AnswerReader(self.prompts, TokenText(self.tokenizer, self.prompts.formats.marks))

    def read(self, completion: Completion | str, **parameters: object) -> ChatAnswer:
        if isinstance(completion, str):
            completion = answered(self.tokenizer, completion)
        (answer,) = self.reader.read(body(**parameters), [completion])
        return answer

    def num_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text))


def body(**parameters: object) -> ChatBody:
    found = parse(chat_line(**{"tools": TOOLS, **parameters})).body
    assert isinstance(found, ChatBody)
    return found


@pytest.fixture(scope="module", params=MARKS)
def qwen3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("marked")
    return Model(path, template_source("marked_calls"), MARKS[request.param], AnswerFormats())


@pytest.fixture(scope="module", params=TAGS)
def llama3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("bare")
    return Model(path, template_source("bare_calls"), TAGS[request.param], AnswerFormats())


def test_calls_between_marks_are_read_whatever_tokens_the_marks_are(qwen3: Model) -> None:
    assert qwen3.read(MARKED) == ChatAnswer(None, (WEATHER,), None, 0)
    assert qwen3.read(f"I look.\n{MARKED_TWO}") == ChatAnswer("I look.", (WEATHER, TIME), None, 0)


def test_reasoning_is_told_apart_and_counted(qwen3: Model) -> None:
    thought = "<think>\nthe weather, then\n</think>"

    assert qwen3.read(f"{thought}\n\nSunny.") == ChatAnswer(
        "Sunny.", (), "the weather, then", qwen3.num_tokens(thought)
    )
    assert qwen3.read(f"{thought}\n\n{MARKED}") == ChatAnswer(
        None, (WEATHER,), "the weather, then", qwen3.num_tokens(thought)
    )


def test_calls_inside_reasoning_are_not_made(qwen3: Model) -> None:
    answer = qwen3.read(f"<think>{MARKED}</think>Sunny.")

    assert (answer.content, answer.calls) == ("Sunny.", ())


def test_reasoning_that_was_cut_is_all_there_is(qwen3: Model) -> None:
    cut = answered(qwen3.tokenizer, "<think>\nthe weather", finish_reason=FinishReason.LENGTH)

    assert qwen3.read(cut) == ChatAnswer("", (), "the weather", len(cut.token_ids))


@pytest.mark.parametrize("text", ["Sunny.", "", "the <b>weather</b>\n", MARKED[:-20], "<tool_call>\n{}\n</tool_call>"])
def test_an_answer_without_parts_is_the_engines_text(qwen3: Model, text: str) -> None:
    completion = answered(qwen3.tokenizer, text)

    assert qwen3.read(completion) == ChatAnswer(completion.text, (), None, 0)


def test_without_tools_on_offer_calls_stay_text(qwen3: Model) -> None:
    completion = answered(qwen3.tokenizer, MARKED)

    assert qwen3.read(completion, tools=None).content == completion.text
    assert qwen3.read(completion, tool_choice="none").content == completion.text


def test_one_call_at_a_time_means_the_first(qwen3: Model) -> None:
    assert qwen3.read(MARKED_TWO, parallel_tool_calls=False).calls == (WEATHER,)


def test_a_stop_string_cuts_before_the_parts_are_read(qwen3: Model) -> None:
    cut = answered(qwen3.tokenizer, f"<think>a</think>Sunny.{MARKED}END", stop="END")
    cut_inside = answered(qwen3.tokenizer, f"Sunny. STOP{MARKED}", stop="STOP")

    assert qwen3.read(cut) == ChatAnswer("Sunny.", (WEATHER,), "a", qwen3.num_tokens("<think>a</think>"))
    assert qwen3.read(cut_inside) == ChatAnswer("Sunny. ", (), None, 0)


def test_bare_calls_are_read_whatever_token_the_tag_is(llama3: Model) -> None:
    assert llama3.read(BARE) == ChatAnswer(None, (WEATHER,))
    assert llama3.read(BARE.removeprefix("<|python_tag|>")) == ChatAnswer(None, (WEATHER,))
    assert llama3.read(f"I look. {BARE}") == ChatAnswer("I look.", (WEATHER,))


@pytest.mark.parametrize("text", ["Sunny.", '<|python_tag|>weather.call(city="Rome")', '{"name": "Rome"}'])
def test_a_bare_answer_that_is_no_call_is_the_engines_text(llama3: Model, text: str) -> None:
    completion = answered(llama3.tokenizer, text)

    assert llama3.read(completion) == ChatAnswer(completion.text)


def test_a_prompt_that_begins_the_reasoning_is_known_by_its_template(tmp_path: Path) -> None:
    switch = "{%- if enable_thinking is defined"
    begun = "{%- if not no_thought is defined %}{{ '<think>\\n' }}{% endif %}"
    source = template_source("marked_calls").replace(switch, begun + switch)
    model = Model(tmp_path, source, QWEN3_TOKENS, AnswerFormats())

    assert model.read("sum\n</think>\n\n4") == ChatAnswer("4", (), "sum", model.num_tokens("sum\n</think>"))
    assert model.read("cut", chat_template_kwargs={"no_thought": True}).content == "cut"
    assert model.read(answered(model.tokenizer, "cut", finish_reason=FinishReason.LENGTH)).reasoning == "cut"


def test_formats_that_are_off_leave_everything_in_the_text(tmp_path: Path) -> None:
    model = Model(tmp_path, template_source("marked_calls"), QWEN3_TOKENS, AnswerFormats("none", "none"))

    assert model.read(f"<think>a</think>{MARKED}") == ChatAnswer(f"<think>a</think>{MARKED}")


def test_a_stop_token_is_no_part_of_the_answer(tmp_path: Path) -> None:
    model = Model(tmp_path, template_source("bare_calls"), LLAMA3_TOKENS, AnswerFormats())
    tag = model.tokenizer.encode("<|python_tag|>")
    completion = Completion(0, "Sunny.", (*model.tokenizer.encode("Sunny."), *tag), FinishReason.STOP, tag[0], None)

    assert model.read(completion) == ChatAnswer("Sunny.")


class Counted:
    """A function, with how often it was called."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *args: object) -> object:
        self.calls += 1
        return self.function(*args)


def test_all_completions_of_a_line_ask_once_how_its_prompt_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tmp_path, template_source("marked_calls"), QWEN3_TOKENS, AnswerFormats())
    opens_reasoning = Counted(model.prompts.opens_reasoning)
    monkeypatch.setattr(model.prompts, "opens_reasoning", opens_reasoning)

    answers = model.reader.read(body(n=3), [answered(model.tokenizer, text) for text in ("a", "<think>b</think>c", "")])

    assert [answer.content for answer in answers] == ["a", "c", ""]
    assert opens_reasoning.calls == 1


def test_an_answer_is_detokenised_once_for_text_and_count(qwen3: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    completion = answered(qwen3.tokenizer, "<think>hm</think>Sunny.")
    new_detokenizer = Counted(qwen3.tokenizer.new_detokenizer)
    monkeypatch.setattr(qwen3.tokenizer, "new_detokenizer", new_detokenizer)

    assert qwen3.read(completion).num_reasoning_tokens == qwen3.num_tokens("<think>hm</think>")
    assert new_detokenizer.calls == 1


def test_mistrals_calls_get_ids_that_its_templates_take_back(tmp_path: Path) -> None:
    model = Model(tmp_path, template_source("marked_calls"), {"[TOOL_CALLS]": True}, AnswerFormats("mistral", "none"))
    read = model.read('[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]')
    assert read == ChatAnswer(None, (TIME, TIME), has_short_ids=True)
    calls: Any = answer_message(read, "chatcmpl-1", 0)["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call["id"]) for call in calls)


def framed(calls: str) -> str:
    """A template that writes an answer's calls so."""
    other = "{{ '[' + m.role + ']' + m.content }}"
    message = f"{{% if m.tool_calls %}}{calls}{{% else %}}{other}{{% endif %}}"
    return f"{{{{ tools | tojson }}}}{{% for m in messages %}}{message}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "text", "calls", "written"),
    [
        (template_source("marked_calls"), MARKED_TWO, (WEATHER, TIME), "qwen3"),
        (template_source("bare_calls"), BARE, (WEATHER,), "llama3"),
        *((framed(calls), text, (WEATHER, TIME), written) for written, (calls, text) in WRITTEN.items()),
    ],
)
def test_calls_that_are_read_are_written_again_as_they_were(
    tmp_path: Path, template: str, text: str, calls: tuple[CalledTool, ...], written: ToolCallFormat
) -> None:
    model = Model(tmp_path, template, {}, AnswerFormats(written, "none"))
    read = model.read(text)
    assert read == ChatAnswer(None, calls, has_short_ids=written.startswith("mistral"))
    question, answer = {"role": "user", "content": "Sun?"}, answer_message(read, "chatcmpl-1", 0)
    asked = [model.prompts.text(body(messages=messages), 0) for messages in ([question], [question, answer])]
    assert text not in asked[0]
    assert text in asked[1] or text.removeprefix("<|python_tag|>") in asked[1]
