"""Which tokens a sequence holds, for its penalties."""

from __future__ import annotations

from collections.abc import Sequence


class TokenCounts:
    """How often each token of a sequence was generated; 0 for those that occur in the prompt alone.

    Kept with the sequence: counting it anew at each step is quadratic in its length.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.generated = dict.fromkeys(prompt_token_ids, 0)

    def add(self, token_id: int) -> None:
        """A token was generated."""
        self.generated[token_id] = self.generated.get(token_id, 0) + 1
