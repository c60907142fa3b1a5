"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from engine.token_logprobs import TokenLogprobs


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """One entry a prompt token: its log-probability behind the tokens before it. None for the first, which nothing
    predicts.

    Filled from front to back, once. Kept as numbers of 4 bytes and spelled out entry by entry as it is read: 20
    alternatives as objects would take 2.5 kB a token, and prompts have tens of thousands.
    """

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        """`num_top`: alternatives a position."""
        self.token_ids = token_ids  # the prompt's
        self.num_top = num_top
        self._logprobs = array("f")
        self._top_ids = array("i")  # num_top a position, fewer where the vocabulary has fewer
        self._top_logprobs = array("f")

    @property
    def num_scored(self) -> int:
        """Leading positions whose next token has its entry: what the model said at these is not needed again."""
        return len(self._logprobs)

    @property
    def is_complete(self) -> bool:
        """Whether every token but the first has its entry."""
        return self.num_scored >= len(self.token_ids) - 1

    def add(self, logprobs: Iterable[float], top_ids: Iterable[int], top_logprobs: Iterable[float]) -> None:
        """Append the next entries; the alternatives of all of them one behind the other, each position's best first."""
        self._logprobs.extend(logprobs)
        self._top_ids.extend(top_ids)
        self._top_logprobs.extend(top_logprobs)

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self._entry(position) for position in range(*index.indices(len(self)))]
        return self._entry(range(len(self))[index])

    def _entry(self, position: int) -> TokenLogprobs | None:
        if position == 0:
            return None
        count = len(self._top_ids) // max(1, self.num_scored)
        those = slice((position - 1) * count, position * count)
        top = tuple(zip(self._top_ids[those], self._top_logprobs[those], strict=True))
        return TokenLogprobs(self.token_ids[position], self._logprobs[position - 1], top)
