"""What turns a growing list of token ids into text."""

from __future__ import annotations

from typing import Protocol


class IncrementalDetokenizer(Protocol):
    """Text of a sequence as its tokens come; what is returned joined together equals decoding all ids at once.

    Each token costs amortised constant time, however long the sequence. `Tokenizer.new_detokenizer` makes one.
    """

    def append(self, token_id: int) -> str:
        """Add a token; returns the text that no later token can change, possibly nothing."""
        ...

    def flush(self) -> str:
        """The sequence ends here: returns what was held back. No token may follow."""
        ...
