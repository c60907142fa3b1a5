from __future__ import annotations

import pytest

from engine.text.chat_template import ChatTemplate
from tests.support.chat_models import template_source
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from worker.records.answers import AnswerFormats

SPECIAL = {"bos_token": "<b>", "eos_token": "</e>"}


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
