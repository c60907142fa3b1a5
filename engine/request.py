"""What a caller asks the engine for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sampling_params import SamplingParams
from engine.token_checkpoint import TokenCheckpoint

RESERVED_PREFIX = "__millrace"  # of the engine's own ids


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. Immutable: what happens to it is in a `RequestState`."""

    request_id: str  # unique among the unfinished requests of an engine; must not start with RESERVED_PREFIX
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0  # lower runs first
    tenant: str = ""  # whose it is: KV and results are shared within a tenant alone, and tenants get equal shares
    resume: TokenCheckpoint | None = None  # go on from here; one that is not of this request is dropped

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)
