"""Reasoning and tool calls in the text of an answer."""

from __future__ import annotations

import pytest

from engine.text.chat_template import ChatTemplate
from tests.support.fake_engine import template_source
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from worker.records.answers import AnswerFormats, split_reasoning

SPECIAL = {"bos_token": "<b>", "eos_token": "</e>"}


def shown_by(source: str, formats: AnswerFormats | None = None) -> AnswerFormats:
    return (formats or AnswerFormats()).for_template(ChatTemplate({"default": source}, SPECIAL).writes)


@pytest.mark.parametrize(
    ("source", "tool_calls", "reasoning"),
    [
        (template_source("marked_calls"), "qwen3", "qwen3"),
        (template_source("bare_calls"), "llama3", "none"),
        (CHAT_TEMPLATE, "auto", "none"),
        ("{{ '<tool_call>\\n<function=' }}", "qwen3_coder", "none"),
        ("{{ '<tool_call>' + name + '<arg_key>' }}", "auto", "none"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral", "none"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_v11", "none"),
        ("{{ '<|tool_call|>' }}", "granite", "none"),
        ("{{ '<function_calls>' }}", "olmo3", "none"),
        ("In the format of [func_name1(name=value)].{{ '\"parameters\"' }}<|start_header_id|>", "pythonic", "none"),
        ('{{ "{\\"name\\": 1, \\"parameters\\": " }}<|start_header_id|>', "llama3", "none"),
        ("{# <tool_call> </think> #}", "auto", "none"),
    ],
    ids=[
        "qwen3",
        "llama3",
        "plain",
        "xml calls",
        "xml of another",
        "mistral",
        "mistral v11",
        "granite",
        "olmo3",
        "pythonic",
        "escaped quotes",
        "only in a comment",
    ],
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
