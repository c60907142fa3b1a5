"""Where one sequence stands in its grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.errors import GrammarFailed

BITS_PER_WORD = 32


class GrammarMatcher:
    """Follows the tokens of one sequence, and says which may come next."""

    def __init__(self, following: LLMatcher, ending_ids: Sequence[int], *, vocab_size: int, mask_size: int) -> None:
        """`ending_ids`: tokens that end it. `mask_size`: tokens of the library's masks, vocab_size or more."""
        self.following = following  # the library's
        self._ending_ids = np.array(ending_ids, dtype=np.int64)
        self.vocab_size = vocab_size
        self.num_mask_words = (mask_size + BITS_PER_WORD - 1) // BITS_PER_WORD

    @property
    def is_over(self) -> bool:
        """Whether the grammar is satisfied and nothing can follow."""
        return self.following.is_stopped() and not self.following.is_error() and self.following.is_accepting()

    def accept(self, token_id: int) -> None:
        """A token was chosen. If it does not fit, or that took over a limit, the sequence fails with its next mask."""
        self.following.consume_token(token_id)

    def complete(self, forbidden: NDArray[np.bool_]) -> GrammarFailed | None:
        """Set in the library's mask [vocab_size] whether it may end here.

        GrammarFailed, and a mask that forbids nothing, where no token may come next: the vocabulary has none that fits,
        or the grammar is too complex here.
        """
        if not self.following.is_error():
            forbidden[self._ending_ids] = not self.following.is_accepting()
            if not forbidden.all():
                return None
        forbidden[:] = False
        return GrammarFailed(self.following.get_error() or "no token of the vocabulary continues this text")
