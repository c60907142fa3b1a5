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


class TokenMasks:
    """Computes masks on several threads at once, off the interpreter's lock; these start with the first mask."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def allowed(self, matchers: Sequence[GrammarMatcher]) -> list[NDArray[np.bool_] | GrammarFailed]:
        """For each sequence which tokens may come next, [vocab_size], or why none may."""
        if not matchers:
            return []
        packed = np.zeros((len(matchers), matchers[0].num_mask_words), np.int32)
        places = [(matcher.following, row) for row, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, places, packed)
        return [matcher.allowed(row) for matcher, row in zip(matchers, packed, strict=True)]

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(self._num_threads)
