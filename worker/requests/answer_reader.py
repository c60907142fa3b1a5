"""Finished chat answers to their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.request import Completion
from worker.answers.chat_answer import ChatAnswer
from worker.answers.read_calls import read_calls
from worker.answers.split_reasoning import split_reasoning
from worker.lines.chat_body import ChatBody
from worker.requests.chat_prompts import ChatPrompts
from worker.requests.token_text import TokenText


class AnswerReader:
    """Reads reasoning and tool calls out of one model's answers. What cannot be read stays text; it never raises."""

    def __init__(self, prompts: ChatPrompts, token_text: TokenText) -> None:
        """`token_text`: of the marks of the same formats."""
        self._prompts = prompts
        self._formats = prompts.formats
        self._token_text = token_text

    def read(self, body: ChatBody, completions: Sequence[Completion]) -> list[ChatAnswer]:
        """The parts of each of `completions`, the answers to `body`."""
        if not self._formats.marks:
            return [ChatAnswer(completion.text) for completion in completions]
        opened = self._prompts.opens_reasoning(body)
        names = frozenset(tool.function.name for tool in body.offered_tools)
        answers = [self._read(completion, names, opened=opened) for completion in completions]
        if body.parallel_tool_calls:
            return answers
        return [replace(answer, calls=answer.calls[:1]) for answer in answers]

    def _read(self, completion: Completion, names: frozenset[str], *, opened: bool) -> ChatAnswer:
        reasons = self._formats.reasoning != "none"
        spelled = self._token_text.of(completion)
        split = split_reasoning(spelled.text, opened=opened) if reasons else None
        answer = spelled.text if split is None else spelled.text[split[1] :].lstrip("\n")
        found = read_calls(answer, self._formats, names) if names else None
        calls, beside = ((), answer) if found is None else found
        content = completion.text if split is None and found is None else self._plain(beside)
        num_reasoning_tokens = 0 if split is None else spelled.num_tokens_of(split[1])
        return ChatAnswer(
            content=None if calls and not content else content,
            calls=calls,
            reasoning=None if split is None else self._plain(split[0]),
            num_reasoning_tokens=num_reasoning_tokens if reasons else None,
        )

    def _plain(self, text: str) -> str:
        """Without the marks that are special tokens, as in any other text."""
        for mark in self._token_text.special_marks:
            text = text.replace(mark, "")
        return text
