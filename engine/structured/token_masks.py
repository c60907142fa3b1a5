"""Which tokens may come next, for all constrained rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from engine.errors import GrammarFailed
from engine.structured.grammar_matcher import GrammarMatcher

Forbidden = tuple[NDArray[np.bool_], Sequence[GrammarFailed | None]]


class TokenMasks:
    """Computes masks on several threads at once, off the interpreter's lock; these start with the first mask."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def forbidden(self, matchers: Sequence[GrammarMatcher]) -> Forbidden:
        """For each sequence, at least one, which tokens may not come next, see `unpack`."""
        packed = np.zeros((len(matchers), matchers[0].num_mask_words), np.int32)
        places = [(matcher.following, row) for row, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, places, packed)
        return unpack(packed, matchers)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._num_threads)


def unpack(packed: NDArray[np.int32], matchers: Sequence[GrammarMatcher]) -> Forbidden:
    """What the library's masks [n, words], a bit a token, forbid: [n, vocab_size], and for each why no token may come
    next; nothing is forbidden then. The grammars may differ, the vocabulary is one.
    """
    bits = np.unpackbits((~packed).view(np.uint8), axis=1, count=matchers[0].vocab_size, bitorder="little")
    masks = bits.view(np.bool_)
    return masks, [matcher.complete(mask) for matcher, mask in zip(matchers, masks, strict=True)]
