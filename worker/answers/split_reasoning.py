"""Reasoning and the answer behind it."""

from __future__ import annotations

from worker.answers.answer_formats import REASONING_BEGIN, REASONING_END


def split_reasoning(text: str, *, opened: bool) -> tuple[str, int] | None:
    """The reasoning at the beginning of `text` and where the answer behind it begins; None if there is none.

    `opened`: the prompt ended with `<think>`, so the text begins inside. Reasoning that was not closed, because the
    answer was cut, is all of the text. Line ends around it belong to the format, which writes them again.
    """
    begin = len(text) - len(text.lstrip())
    if text.startswith(REASONING_BEGIN, begin):
        begin += len(REASONING_BEGIN)
    elif opened:
        begin = 0
    else:
        return None
    end = text.find(REASONING_END, begin)
    if end < 0:
        return text[begin:].strip("\n"), len(text)
    return text[begin:end].strip("\n"), end + len(REASONING_END)
