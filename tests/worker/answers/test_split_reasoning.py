from __future__ import annotations

import pytest

from worker.records.answers import split_reasoning


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
