"""Outputs on their way out, and their account."""

from __future__ import annotations

from array import array

from engine.completion import Completion
from engine.errors import EngineError
from engine.request import Request
from engine.request_output import RequestOutput
from engine.request_timings import RequestTimings
from engine.scheduling.request_group import RequestGroup


class FinishedRequests:
    """Collects the one output of each request that ended, and counts what it came to."""

    def __init__(self) -> None:
        self._ready: list[RequestOutput] = []
        self.num_requests = self.num_duplicates = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0

    @property
    def is_empty(self) -> bool:
        """Whether `take` has nothing to hand out."""
        return not self._ready

    def add(self, request: Request, group: RequestGroup, completions: tuple[Completion, ...]) -> None:
        """One of a group's requests ended with these completions, or with the group's error.

        Nothing was computed for a request that is not the group's first: all of its prompt counts as cached.
        """
        first, num_prompt_tokens = group.states[0], len(request.prompt_token_ids)
        is_duplicate = request is not group.request
        output = RequestOutput(
            request_id=request.request_id,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_prompt_tokens if is_duplicate else first.num_cached_tokens,
            completions=() if group.error is not None else completions,
            error=group.error,
            num_resumed_tokens=group.num_resumed_tokens,
            prompt_logprobs=group.prompt_logprobs if group.error is None else None,
            timings=None if is_duplicate else group.timings_now(),
        )
        self._add(output, is_duplicate=is_duplicate)
        self.output_tokens += sum(state.num_output_tokens for state in group.states)

    def add_embeddings(
        self,
        request_id: str,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        embeddings: tuple[array[float], ...],
        *,
        timings: RequestTimings | None = None,
        is_duplicate: bool = False,
    ) -> None:
        """An embedding request ended with these vectors; none of one that was aborted."""
        output = RequestOutput(
            request_id, num_prompt_tokens, num_cached_tokens, (), embeddings=embeddings, timings=timings
        )
        self._add(output, is_duplicate=is_duplicate)

    def add_failed_embeddings(
        self, request_id: str, num_prompt_tokens: int, error: EngineError, timings: RequestTimings | None
    ) -> None:
        """An embedding request ended with an error."""
        self._add(RequestOutput(request_id, num_prompt_tokens, 0, (), error, timings=timings), is_duplicate=False)

    def _add(self, output: RequestOutput, *, is_duplicate: bool) -> None:
        self._ready.append(output)
        self.num_requests += 1
        self.num_duplicates += is_duplicate
        self.prompt_tokens += output.num_prompt_tokens
        self.cached_tokens += output.num_cached_tokens

    def take(self) -> list[RequestOutput]:
        """The outputs since the last call."""
        ready, self._ready = self._ready, []
        return ready
