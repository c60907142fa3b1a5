"""Finished chat answers to their parts."""

from __future__ import annotations

from engine.completion import Completion
from engine.text.tokenizer import Tokenizer
from worker.answers.chat_answer import ChatAnswer
from worker.answers.read_calls import read_calls
from worker.answers.split_reasoning import split_reasoning
from worker.lines.chat_body import ChatBody
from worker.requests.chat_prompts import ChatPrompts
from worker.requests.token_text import TokenText


class AnswerReader:
    """Reads reasoning and tool calls out of one model's answers. What cannot be read stays text; it never raises."""

    def __init__(self, tokenizer: Tokenizer, prompts: ChatPrompts) -> None:
        self._prompts = prompts
        self._formats = prompts.formats
        marks = prompts.formats.marks
        self._token_text = TokenText(tokenizer, marks) if marks else None
        self.special_marks = {} if self._token_text is None else self._token_text.special_marks  # mark -> token id

    def read(self, body: ChatBody, completion: Completion) -> ChatAnswer:
        """The parts of `completion`, an answer to `body`."""
        if self._token_text is None:
            return ChatAnswer(completion.text)
        text = self._token_text.of(completion)
        split = self._split(body, text)
        answer = text if split is None else text[split[1] :].lstrip("\n")
        names = {tool.function.name for tool in body.offered_tools}
        found = read_calls(answer, self._formats, names) if names else None
        calls, beside = ((), answer) if found is None else found
        content = completion.text if split is None and found is None else self._plain(beside)
        return ChatAnswer(
            content=None if calls and not content else content,
            calls=calls if body.parallel_tool_calls else calls[:1],
            reasoning=None if split is None else self._plain(split[0]),
            num_reasoning_tokens=self._num_reasoning_tokens(completion, split),
        )

    def _split(self, body: ChatBody, text: str) -> tuple[str, int] | None:
        if self._formats.reasoning == "none":
            return None
        return split_reasoning(text, opened=self._prompts.opens_reasoning(body))

    def _num_reasoning_tokens(self, completion: Completion, split: tuple[str, int] | None) -> int | None:
        if self._token_text is None or self._formats.reasoning == "none":
            return None
        return 0 if split is None else self._token_text.num_tokens(completion, split[1])

    def _plain(self, text: str) -> str:
        """Without the marks that are special tokens, as in any other text."""
        for mark in self.special_marks:
            text = text.replace(mark, "")
        return text
