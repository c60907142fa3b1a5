"""The tool calls of an answer, and the text beside them."""

from __future__ import annotations

from collections.abc import Collection

from worker.answers.answer_formats import CALL_BEGIN, CALL_END, PYTHON_TAG, AnswerFormats
from worker.answers.called_tool import CalledTool
from worker.answers.read_call import after_space, read_call

Read = tuple[tuple[CalledTool, ...], str]  # the calls, and the text outside them


def read_calls(text: str, formats: AnswerFormats, names: Collection[str]) -> Read | None:
    """The calls in `text` of the functions `names`; None if it holds none, or one that cannot be read.

    All or nothing: a caller who is told of one call of two would act on half an answer. Never raises.
    """
    if formats.tool_calls == "qwen3":
        return _marked(text, names)
    return _bare(text, names) if formats.tool_calls == "llama3" else None


def _marked(text: str, names: Collection[str]) -> Read | None:
    """Qwen3's. The last end mark may be missing: some models end the answer in its place."""
    calls: list[CalledTool] = []
    beside: list[str] = []
    position = 0
    while (begin := text.find(CALL_BEGIN, position)) >= 0:
        beside.append(text[position:begin])
        found = read_call(text, after_space(text, begin + len(CALL_BEGIN)), names)
        if found is None:
            return None
        call, end = found
        calls.append(call)
        position = after_space(text, end)
        if text.startswith(CALL_END, position):
            position += len(CALL_END)
        elif position < len(text):
            return None
    beside.append(text[position:])
    return (tuple(calls), "".join(beside).strip()) if calls else None


def _bare(text: str, names: Collection[str]) -> Read | None:
    """Llama 3's: the whole answer, or all of it behind the tag. Of several calls a `;` may stand between two."""
    before, tag, behind = text.partition(PYTHON_TAG)
    if not tag:
        before, behind = "", text
    calls: list[CalledTool] = []
    position = after_space(behind, 0)
    while position < len(behind):
        found = read_call(behind, position, names)
        if found is None:
            return None
        call, position = found
        calls.append(call)
        position = after_space(behind, position)
        if behind.startswith(";", position):
            position = after_space(behind, position + 1)
    return (tuple(calls), before.strip()) if calls else None
