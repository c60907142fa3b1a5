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
        self._vocab_size = vocab_size
        self.num_mask_words = (mask_size + BITS_PER_WORD - 1) // BITS_PER_WORD

    @property
    def is_over(self) -> bool:
        """Whether the grammar is satisfied and nothing can follow."""
        return self.following.is_stopped() and not self.following.is_error() and self.following.is_accepting()

    def accept(self, token_id: int) -> None:
        """A token was chosen. If it does not fit, or that took over a limit, the sequence fails with its next mask."""
        self.following.consume_token(token_id)

    def allowed(self, packed: NDArray[np.int32]) -> NDArray[np.bool_] | GrammarFailed:
        """Which tokens may come next, [vocab_size], from the library's mask [num_mask_words], a bit a token.

        GrammarFailed where none may: the vocabulary has none that fits, or the grammar is too complex here.
        """
        if not self.following.is_error():
            bits = np.unpackbits(packed.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)
            bits[self._ending_ids] = self.following.is_accepting()
            if bits.any():
                return bits
        return GrammarFailed(self.following.get_error() or "no token of the vocabulary continues this text")
