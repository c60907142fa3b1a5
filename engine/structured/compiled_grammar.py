"""A grammar, ready for any number of sequences."""

from __future__ import annotations

from collections.abc import Collection

from llguidance import LLMatcher

from engine.structured.grammar_matcher import GrammarMatcher


class CompiledGrammar:
    """A grammar compiled for one model's vocabulary."""

    def __init__(self, first_state: LLMatcher, *, vocab_size: int, mask_size: int) -> None:
        self._first_state = first_state
        self._vocab_size = vocab_size
        self._mask_size = mask_size

    def new_matcher(self, ending_ids: Collection[int]) -> GrammarMatcher:
        """For one sequence (2 us). `ending_ids`: tokens that end it, allowed where the grammar is satisfied."""
        first_state = self._first_state.deep_copy()
        return GrammarMatcher(first_state, sorted(ending_ids), vocab_size=self._vocab_size, mask_size=self._mask_size)
