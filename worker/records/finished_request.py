"""What a success record needs to know of an engine's output.

Structural types, here and in the files it imports: records are read and written by producers too, which have no
engine installed. The engine's RequestOutput, Completion and TokenLogprobs satisfy them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from worker.records.finished_completion import FinishedCompletion


class FinishedRequest(Protocol):
    """A request that ran to its end."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that the prefix cache had."""
        ...

    @property
    def completions(self) -> Sequence[FinishedCompletion]:
        """In index order; none of a request for embeddings."""
        ...

    @property
    def embeddings(self) -> Sequence[array[float]]:
        """Vectors of float32 numbers, in the order of the inputs; none of a request that generates."""
        ...
