"""What a caller asks the engine to embed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Some inputs, each of which becomes one vector. Immutable: what happens to them is in `EmbeddingState`s."""

    request_id: str  # unique among the unfinished requests of an engine, of either kind
    inputs: Sequence[Sequence[int]]  # token ids; at least one input, none of them empty
    dimensions: int | None = None  # leading elements to keep of each vector; None: all
    priority: int = 0  # lower runs first
    tenant: str = ""  # as in Request

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all inputs."""
        return sum(map(len, self.inputs))
