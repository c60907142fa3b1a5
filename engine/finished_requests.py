"""Outputs on their way out, and their account."""

from __future__ import annotations

from engine.completion import Completion
from engine.request import Request
from engine.request_output import RequestOutput
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
        )
        self._ready.append(output)
        self.num_requests += 1
        self.num_duplicates += is_duplicate
        self.prompt_tokens += num_prompt_tokens
        self.cached_tokens += output.num_cached_tokens
        self.output_tokens += sum(state.num_output_tokens for state in group.states)

    def take(self) -> list[RequestOutput]:
        """The outputs since the last call."""
        ready, self._ready = self._ready, []
        return ready
