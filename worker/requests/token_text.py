"""The text of answers, token by token, with the marks of one model's formats."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from engine.request import Completion, FinishReason
from engine.text.tokenizer import Tokenizer
from worker.requests.answer_text import AnswerText


class TokenText:
    """The text of answers with the marks put back that are special tokens of the tokenizer, and so not in the text."""

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
    """The tokens less the one that ended the sequence, which is not in the text unless a stop string did."""
    ended_by_token = completion.finish_reason is FinishReason.STOP and not isinstance(completion.stop_reason, str)
    return completion.token_ids[:-1] if ended_by_token else completion.token_ids
