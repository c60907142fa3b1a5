"""What a request ends in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from engine.completion import Completion
from engine.errors import EngineError
from engine.finish_reason import FinishReason
from engine.prompt_logprobs import PromptLogprobs
from engine.request_timings import RequestTimings


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The one end of one request: its completions, or its embeddings, or the error that stopped it."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV came from the prefix cache; all where an equal request was run
    completions: tuple[Completion, ...]  # in index order; none of an embedding request
    error: EngineError | None = None
    num_resumed_tokens: int = 0  # of the completions: taken over from a checkpoint, not generated here
    embeddings: tuple[array[float], ...] = ()  # float32, of length 1, in the order of the inputs
    prompt_logprobs: PromptLogprobs | None = None  # one a prompt token; None unless asked for, or where it was aborted
    timings: RequestTimings | None = None  # None where nothing was run for it: refused, or an equal request was run

    @property
    def was_aborted(self) -> bool:
        """Whether somebody ended it early. Of an embedding request nothing is left then: it has no half vectors."""
        if self.error is not None or self.embeddings:
            return False
        return not self.completions or any(c.finish_reason is FinishReason.CANCELLED for c in self.completions)
