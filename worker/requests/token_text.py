"""An answer's text, token by token, with its format's marks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from engine.completion import Completion
from engine.finish_reason import FinishReason
from engine.text.tokenizer import Tokenizer


class TokenText:
    """The text of answers with the marks put back that are special tokens of the tokenizer, and so not in the text."""

    def __init__(self, tokenizer: Tokenizer, marks: Collection[str]) -> None:
        self._tokenizer = tokenizer
        special = {token_id: tokenizer.token_text(token_id) for token_id in tokenizer.special_token_ids}
        self._marks = {token_id: text for token_id, text in special.items() if text in marks}

    @property
    def special_marks(self) -> dict[str, int]:
        """The marks that are special tokens, with their ids."""
        return {text: token_id for token_id, text in self._marks.items()}

    def of(self, completion: Completion) -> str:
        """The completion's text with the marks in their places."""
        if not self._marks or self._marks.keys().isdisjoint(completion.token_ids):
            return completion.text
        pieces: list[str] = []
        position = 0  # in completion.text, which a stop string may have cut
        for token_id, end in self._ends(_in_text(completion)):
            pieces.append(completion.text[position:end])
            position = end
            if token_id in self._marks and end <= len(completion.text):
                pieces.append(self._marks[token_id])
        return "".join((*pieces, completion.text[position:]))

    def num_tokens(self, completion: Completion, num_characters: int) -> int:
        """How many tokens the first `num_characters` of `of(completion)` took; those that are not text count too."""
        marks = 0
        for count, (token_id, end) in enumerate(self._ends(_in_text(completion)), start=1):
            marks += len(self._marks.get(token_id, ""))
            if end + marks >= num_characters:
                return count
        return len(completion.token_ids)

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
