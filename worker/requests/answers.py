"""Reads a model's answers to chats: where tokens and marks stand in the text, and the parts that marks tell apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.request import Completion, FinishReason
from engine.text.tokenizer import Tokenizer
from worker.lines.chat import ChatBody
from worker.records.answers import ChatAnswer, split_reasoning
from worker.records.harmony import read_channels
from worker.records.tool_calls import Tools, read_calls
from worker.requests.chat_prompts import ChatPrompts


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
        tools = {tool.function.name: tool.function.parameters for tool in body.offered_tools}
        answers = [self._read(completion, tools, opened=opened) for completion in completions]
        if body.parallel_tool_calls:
            return answers
        return [replace(answer, calls=answer.calls[:1]) for answer in answers]

    def _read(self, completion: Completion, tools: Tools, *, opened: bool) -> ChatAnswer:
        reasons = self._formats.reasoning != "none"
        spelled = self._token_text.of(completion)
        if self._formats.is_harmony:
            return self._read_channels(completion, spelled, tools)
        split = split_reasoning(spelled.text, opened=opened) if reasons else None
        answer = spelled.text if split is None else spelled.text[split[1] :].lstrip("\n")
        found = read_calls(answer, self._formats.tool_calls, tools) if tools else None
        calls, beside = ((), answer) if found is None else found
        content = completion.text if split is None and found is None else self._plain(beside)
        num_reasoning_tokens = 0 if split is None else spelled.num_tokens_of(split[1])
        return ChatAnswer(
            content=None if calls and not content else content,
            calls=calls,
            reasoning=None if split is None else self._plain(split[0]),
            has_short_ids=self._formats.has_short_ids,
            num_reasoning_tokens=num_reasoning_tokens if reasons else None,
        )

    def _read_channels(self, completion: Completion, spelled: AnswerText, tools: Tools) -> ChatAnswer:
        reasons, calls = self._formats.reasoning == "harmony", self._formats.tool_calls == "harmony"
        found = read_channels(spelled.text, tools if calls else ())
        if found is None:
            return ChatAnswer(completion.text, num_reasoning_tokens=0 if reasons else None)
        content = found.content
        if not reasons and found.reasoning:
            content = "\n\n".join(part for part in (found.reasoning, content) if part)
        content = self._plain(content)
        return ChatAnswer(
            content=None if found.calls and not content else content,
            calls=found.calls,
            reasoning=self._plain(found.reasoning) if reasons and found.reasoning is not None else None,
            num_reasoning_tokens=self._num_reasoning_tokens(spelled, found.reasoning_end) if reasons else None,
        )

    @staticmethod
    def _num_reasoning_tokens(spelled: AnswerText, num_characters: int) -> int:
        return spelled.num_tokens_of(num_characters) if num_characters else 0

    def _plain(self, text: str) -> str:
        """Without the marks that are special tokens, as in any other text."""
        for mark in self._token_text.special_marks:
            text = text.replace(mark, "")
        return text


class TokenText:
    """Puts marks that are special tokens, which a completion's text leaves out, back into it."""

    def __init__(self, tokenizer: Tokenizer, marks: Collection[str]) -> None:
        self._tokenizer = tokenizer
        ids = tokenizer.special_token_ids if marks else ()
        self._marks = {token_id: text for token_id in ids if (text := tokenizer.token_text(token_id)) in marks}
        self.special_marks = {text: token_id for token_id, text in self._marks.items()}  # mark -> id

    def of(self, completion: Completion) -> AnswerText:
        """The completion's text with the marks in their places."""
        ends = self._ends(_in_text(completion))
        num_tokens = len(completion.token_ids)
        if self._marks.keys().isdisjoint(completion.token_ids):
            return AnswerText(completion.text, (end for _, end in ends), num_tokens)
        pieces: list[str] = []
        ends_with_marks: list[int] = []
        position = 0  # in completion.text, which a stop string may have cut
        marks = 0  # characters of them so far
        for token_id, end in ends:
            pieces.append(completion.text[position:end])
            position = end
            if token_id in self._marks:
                marks += len(self._marks[token_id])
                pieces.append(self._marks[token_id] if end <= len(completion.text) else "")
            ends_with_marks.append(end + marks)
        return AnswerText("".join((*pieces, completion.text[position:])), ends_with_marks, num_tokens)

    def _ends(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Each token with how much of the text without marks is certain behind it."""
        detokenizer = self._tokenizer.new_detokenizer()
        end = 0
        for token_id in token_ids:
            end += len(detokenizer.append(token_id))
            yield token_id, end


def _in_text(completion: Completion) -> Sequence[int]:
    """The tokens that are in the text: all but the one that ended the sequence, unless a stop string did."""
    ended_by_token = completion.finish_reason is FinishReason.STOP and not isinstance(completion.stop_reason, str)
    return completion.token_ids[:-1] if ended_by_token else completion.token_ids


@dataclass(frozen=True, slots=True)
class AnswerText:
    """The text, and where its tokens end in it."""

    text: str
    ends: Iterable[int]  # how much of the text is certain behind each token, in characters; read once
    num_tokens: int  # all that were generated, the one that ended the sequence included

    def num_tokens_of(self, num_characters: int) -> int:
        """How many tokens the first `num_characters` took; those that are not text count too. Asked once."""
        for count, end in enumerate(self.ends, start=1):
            if end >= num_characters:
                return count
        return self.num_tokens
