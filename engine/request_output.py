"""What a request ends in."""

from __future__ import annotations

from dataclasses import dataclass

from engine.completion import Completion
from engine.errors import EngineError


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The one end of one request: its completions, or the error that stopped it."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV came from the prefix cache; all where an equal request was run
    completions: tuple[Completion, ...]  # in index order
    error: EngineError | None = None
    num_resumed_tokens: int = 0  # of the completions: taken over from a checkpoint, not generated here
