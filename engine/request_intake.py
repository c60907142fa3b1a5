"""From requests to the sequences that are run for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from engine.finish_reason import FinishReason
from engine.kv_cache.block_manager import BlockManager
from engine.prompt_logprobs import PromptLogprobs
from engine.request import Request
from engine.request_checkpoints import RequestCheckpoints
from engine.sampling.token_counts import TokenCounts
from engine.scheduling.request_group import RequestGroup
from engine.scheduling.request_state import RequestState

SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: keeps the streams of a request's n sequences apart


class RequestIntake:
    """Makes groups: new ones, ones that go on from a checkpoint, and copies of those that run."""

    def __init__(
        self,
        blocks: BlockManager,
        checkpoints: RequestCheckpoints,
        *,
        max_model_len: int,
        seed: int | None,
        arrivals: Iterator[int],
    ) -> None:
        self._blocks = blocks
        self._checkpoints = checkpoints
        self._max_model_len = max_model_len
        self._entropy = random.SystemRandom() if seed is None else random.Random(seed)
        self._arrivals = arrivals  # shared with whatever else queues sequences: they are told apart by these numbers

    def begin(self, request: Request, key: bytes | None) -> RequestGroup:
        """A group for a checked request. One with a checkpoint goes on behind it.

        Prompt and tokens so far are then prefilled as after a preemption. A checkpoint of anything else, or a damaged
        one, is dropped with a warning and the request starts over.
        """
        checkpoint = self._checkpoints.usable(request)
        request = replace(request, resume=None)  # may be large: not kept for the request's life
        if checkpoint is not None:
            group = self._new_group([request], checkpoint.base_seed, key)
            if self._checkpoints.restore(checkpoint, group.states):
                group.num_resumed_tokens = checkpoint.num_tokens
                for state in group.unfinished:
                    state.chain = self._blocks.new_chain(state.token_ids, request.tenant)
                return group
        seed = request.params.seed
        return self._new_group([request], self._entropy.getrandbits(63) if seed is None else seed, key)

    def begin_again(self, group: RequestGroup, requests: list[Request]) -> RequestGroup:
        """A new group for requests of one that failed, from their prompts, as urgent and with the same draws."""
        again = self._new_group(requests, group.base_seed, group.key)
        for state in again.states:
            state.priority = group.priority
            state.arrived_s = group.states[0].arrived_s
        return again

    def copy_for(self, request: Request, group: RequestGroup) -> RequestGroup:
        """A group of its own for one of a group's requests, as far as that group has come; not to be run.

        Nothing is accounted to it: the work done is the others'.
        """
        copy = self._new_group([request], group.base_seed, None)
        copy.states[0].num_cached_tokens = copy.states[0].num_prompt_tokens
        copy.num_resumed_tokens = group.num_resumed_tokens
        self._checkpoints.copy_progress(group, copy.states)
        return copy

    def _new_group(self, requests: list[Request], base_seed: int, key: bytes | None) -> RequestGroup:
        request, arrival = requests[0], next(self._arrivals)
        params, room = request.params, self._max_model_len - len(request.prompt_token_ids)
        states = tuple(
            RequestState(
                request=request,
                index=index,
                arrival=arrival,
                seed=_signed_64(base_seed + index * SEED_STRIDE),
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                chain=self._blocks.new_chain(request.prompt_token_ids, request.tenant),
                token_ids=list(request.prompt_token_ids),
                counts=TokenCounts(request.prompt_token_ids) if params.has_penalties else None,
            )
            for index in range(params.n)
        )
        if params.prompt_logprobs is not None:  # the prompt is the same for all: one of them is enough
            states[0].prompt_logprobs = PromptLogprobs(request.prompt_token_ids, params.prompt_logprobs)
        for state in states:
            if state.max_tokens == 0 and not state.scores_prompt:
                state.finish_reason = FinishReason.LENGTH  # there is nothing to run
        return RequestGroup(requests, states, key, base_seed=base_seed)


def _signed_64(value: int) -> int:
    """The low 64 bits as a signed number: what an int64 tensor holds."""
    return (value + 2**63) % 2**64 - 2**63
