"""Requests and scheduler states for tests of the bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_cache.block_manager import BlockManager
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import RequestState


def make_request(
    request_id: str, prompt: Sequence[int], *, max_tokens: int = 4, priority: int = 0, n: int = 1
) -> Request:
    """A greedy request that only max_tokens ends."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, n=n)
    return Request(request_id, tuple(prompt), params, priority)


def make_state(request: Request, blocks: BlockManager, arrival: int = 0) -> RequestState:
    """The first sequence of a request."""
    return RequestState(
        request=request,
        index=0,
        arrival=arrival,
        seed=0,
        max_tokens=request.params.max_tokens or 1,
        chain=blocks.new_chain(request.prompt_token_ids, ""),
        token_ids=list(request.prompt_token_ids),
    )
