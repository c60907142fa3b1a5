"""Engine outputs for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import EngineError
from engine.request import Completion, FinishReason, RequestOutput, TokenLogprobs


def completion(
    text: str = "ok",
    *,
    index: int = 0,
    token_ids: Sequence[int] = (7, 8),
    finish_reason: FinishReason = FinishReason.STOP,
    stop_reason: str | int | None = None,
    logprobs: Sequence[TokenLogprobs] | None = None,
) -> Completion:
    """A finished completion."""
    kept = None if logprobs is None else tuple(logprobs)
    return Completion(index, text, tuple(token_ids), finish_reason, stop_reason, kept)


def request_output(request_id: str = "0", *completions: Completion, error: EngineError | None = None) -> RequestOutput:
    """The end of a request with 5 prompt tokens, 4 of them cached; one completion unless told."""
    found = completions if completions or error else (completion(),)
    return RequestOutput(request_id, num_prompt_tokens=5, num_cached_tokens=4, completions=found, error=error)
