"""Scheduler and block manager without a model: every token takes the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.kv_cache.block_manager import BlockManager
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import RequestState
from engine.scheduling.waiting_queue import SchedulerLimits


class DryEngine:
    """Runs requests as the engine would, on the same scheduler and the same account of KV blocks, exactly and fast.

    Real: admission, chunks, prefix hits, eviction, preemption. Skipped: the model and the sampler; generated tokens are
    numbers that occur in no prompt and in no other sequence.
    """

    def __init__(self, blocks: BlockManager, limits: SchedulerLimits) -> None:
        self.blocks = blocks
        self.scheduler = Scheduler(limits, blocks)
        self.scheduled_tokens = 0  # the clock
        self.prompt_tokens_run = 0  # prompt positions run, those run again after a preemption included
        self.num_steps = 0
        self._arrivals = 0

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, tenant: str = "") -> RequestState:
        """Queue a request that generates `max_tokens` tokens."""
        self._arrivals += 1
        state = RequestState(
            request=Request(request_id, prompt, SamplingParams(max_tokens=max_tokens), tenant=tenant),
            index=0,
            arrival=self._arrivals,
            seed=0,
            max_tokens=max_tokens,
            chain=self.blocks.new_chain(prompt, tenant),
            token_ids=list(prompt),
        )
        self.scheduler.add(state)
        return state

    def run(self, on_finished: Callable[[RequestState], None] = lambda _: None) -> None:
        """Run until nothing is left; `on_finished` may add more."""
        while self.scheduler.has_work:
            for state in self.step():
                on_finished(state)

    def step(self) -> list[RequestState]:
        """Run one step; the sequences that ended."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        self.num_steps += 1
        self.scheduled_tokens += batch.num_tokens
        for item in batch.items:
            end = min(item.start + item.num_scheduled_tokens, item.state.num_prompt_tokens)
            self.prompt_tokens_run += max(end - item.start, 0)
        self.scheduler.commit(batch.items)
        finished: list[RequestState] = []
        for item in batch.items:
            state = item.state
            if not item.samples or not isinstance(state, RequestState):
                continue
            state.token_ids.append(-(state.arrival * 4096 + state.num_output_tokens) - 1)
            if state.num_output_tokens >= state.max_tokens:
                state.finish_reason = FinishReason.LENGTH
                self.scheduler.finish(state)
                finished.append(state)
        return finished
