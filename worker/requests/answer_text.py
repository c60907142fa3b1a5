"""One answer's text, with its format's marks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
