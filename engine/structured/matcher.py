"""Follows each sequence through its grammar, and masks the tokens that may not come next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from engine.errors import GrammarFailed

BITS_PER_WORD = 32

Forbidden = tuple[NDArray[np.bool_], Sequence[GrammarFailed | None]]


class GrammarMatcher:
    """Follows the tokens of one sequence, and says which may come next."""

    def __init__(self, following: LLMatcher, ending_ids: Sequence[int], *, vocab_size: int, mask_size: int) -> None:
        """`ending_ids`: tokens that end the sequence. `mask_size`: tokens of the library's masks, >= vocab_size."""
        self.following = following  # the library's
        self._ending_ids = np.array(ending_ids, dtype=np.int64)
        self.vocab_size = vocab_size
        self.num_mask_words = (mask_size + BITS_PER_WORD - 1) // BITS_PER_WORD

    @property
    def is_over(self) -> bool:
        """Whether the grammar is satisfied and nothing can follow."""
        return self.following.is_stopped() and not self.following.is_error() and self.following.is_accepting()

    def accept(self, token_id: int) -> None:
        """Take the chosen token. If it does not fit, or breaks a limit, the sequence fails with its next mask."""
        self.following.consume_token(token_id)

    def copy(self) -> GrammarMatcher:
        """Another at the same place in the grammar (2 us)."""
        copied = GrammarMatcher(self.following.deep_copy(), (), vocab_size=self.vocab_size, mask_size=0)
        copied._ending_ids, copied.num_mask_words = self._ending_ids, self.num_mask_words
        return copied

    def complete(self, forbidden: NDArray[np.bool_]) -> GrammarFailed | None:
        """Set in the library's mask [vocab_size] whether the sequence may end here.

        Returns GrammarFailed, and clears the mask, if no token may come next: the vocabulary has none that fits, or the
        grammar is too complex here.
        """
        if not self.following.is_error():
            forbidden[self._ending_ids] = not self.following.is_accepting()
            if not forbidden.all():
                return None
        forbidden[:] = False
        return GrammarFailed(self.following.get_error() or "no token of the vocabulary continues this text")


class CompiledGrammar:
    """A grammar compiled for one model's vocabulary."""

    def __init__(self, first_state: LLMatcher, *, vocab_size: int, mask_size: int) -> None:
        self._first_state = first_state
        self._vocab_size = vocab_size
        self._mask_size = mask_size

    def new_matcher(self, ending_ids: Collection[int]) -> GrammarMatcher:
        """A matcher for a sequence (2 us). `ending_ids`: tokens that end it, allowed where the grammar is satisfied."""
        first_state = self._first_state.deep_copy()
        return GrammarMatcher(first_state, sorted(ending_ids), vocab_size=self._vocab_size, mask_size=self._mask_size)


class TokenMasks:
    """Computes masks on several threads, off the interpreter's lock. The first mask starts the threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def forbidden(self, matchers: Sequence[GrammarMatcher]) -> Forbidden:
        """Which tokens may not come next, for each of at least one sequence: see `unpack`."""
        packed = np.zeros((len(matchers), matchers[0].num_mask_words), np.int32)
        places = [(matcher.following, row) for row, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, places, packed)
        return unpack(packed, matchers)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._num_threads)


def unpack(packed: NDArray[np.int32], matchers: Sequence[GrammarMatcher]) -> Forbidden:
    """What the library's masks [n, words], a bit a token, forbid [n, vocab_size], and the failure of each sequence that
    no token may continue, for which nothing is forbidden. All matchers have one vocabulary.
    """
    bits = np.unpackbits((~packed).view(np.uint8), axis=1, count=matchers[0].vocab_size, bitorder="little")
    masks = bits.view(np.bool_)
    return masks, [matcher.complete(mask) for matcher, mask in zip(matchers, masks, strict=True)]
