"""What each step runs, sequence by sequence, without a model."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise

import pytest

from engine.errors import EngineFatal
from engine.kv_cache.block_manager import BlockManager
from engine.request import FinishReason
from engine.scheduling.scheduler import ScheduledBatch, Scheduler
from engine.scheduling.sequence import RequestState
from engine.scheduling.waiting_queue import SchedulerLimits
from tests.support.engines import make_request, make_state

BLOCK = 4


class SchedulerHarness:
    """A scheduler whose model always answers token 7."""

    def __init__(
        self, *, num_blocks: int = 65, seqs: int = 8, tokens: int = 16, unified: bool = True, prefix: bool = True
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK, prefix_caching=prefix)
        self.scheduler = Scheduler(SchedulerLimits(seqs, tokens, unified), self.blocks)
        self.finished: list[str] = []
        self._arrivals = 0

    def add(
        self, name: str, prompt_len: int, *, first: int = 0, max_tokens: int = 4, priority: int = 0
    ) -> RequestState:
        prompt = range(first, first + prompt_len)
        request = make_request(name, prompt, max_tokens=max_tokens, priority=priority)
        state = make_state(request, self.blocks, self._arrivals)
        self._arrivals += 1
        self.scheduler.add(state)
        return state

    def step(self) -> dict[str, tuple[int, int]]:
        """Run one step; what it ran as name -> (start, tokens)."""
        batch = self.scheduler.schedule()
        if batch is None:
            return {}
        self._apply(batch)
        self.scheduler.check_integrity()
        return {i.state.request.request_id: (i.start, i.num_scheduled_tokens) for i in batch.items}

    def _apply(self, batch: ScheduledBatch) -> None:
        self.scheduler.commit(batch.items)
        for item in batch.items:
            state = item.state
            assert isinstance(state, RequestState)
            if not item.samples:
                continue
            state.token_ids.append(7)
            if state.num_output_tokens >= state.max_tokens:
                state.finish_reason = FinishReason.LENGTH
                self.scheduler.finish(state)
                self.finished.append(state.request.request_id)

    def run(self) -> list[dict[str, tuple[int, int]]]:
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
            assert len(steps) < 10_000
        return steps


def test_a_prompt_is_prefilled_in_chunks_and_then_decoded() -> None:
    harness = SchedulerHarness(tokens=8)
    harness.add("a", 19, max_tokens=3)
    assert harness.run() == [{"a": (0, 8)}, {"a": (8, 8)}, {"a": (16, 3)}, {"a": (19, 1)}, {"a": (20, 1)}]


def test_prefill_and_decode_share_a_step() -> None:
    harness = SchedulerHarness(tokens=8)
    harness.add("a", 6)
    harness.step()
    harness.add("b", 9, first=100)
    assert harness.step() == {"a": (6, 1), "b": (0, 7)}
    assert harness.step() == {"a": (7, 1), "b": (7, 2)}


def test_decode_rows_go_longest_first_and_chunks_behind_them_by_rank() -> None:
    harness = SchedulerHarness(tokens=64)
    for rank, length in enumerate((3, 9, 5, 9)):
        harness.add("abcd"[rank], length, first=100 * rank, priority=rank)
    assert list(harness.step()) == list("abcd")
    harness.add("e", 4, first=400, priority=4)
    harness.add("f", 60, first=500, priority=5)
    assert [*harness.step().items()] == [
        *(("b", (9, 1)), ("d", (9, 1)), ("c", (5, 1)), ("a", (3, 1))),
        *(("e", (0, 4)), ("f", (0, 56))),
    ]


def test_prefill_and_decode_take_turns_when_the_switch_is_off() -> None:
    harness = SchedulerHarness(tokens=8, unified=False)
    harness.add("a", 6)
    harness.step()
    harness.add("b", 10, first=100)
    assert [harness.step() for _ in range(3)] == [{"b": (0, 8)}, {"b": (8, 2)}, {"a": (6, 1), "b": (10, 1)}]


def test_no_more_sequences_run_than_allowed() -> None:
    harness = SchedulerHarness(seqs=2, tokens=64)
    for name in "abc":
        harness.add(name, 3, first=ord(name) * 10, max_tokens=2)
    assert harness.step().keys() == {"a", "b"}
    assert harness.step().keys() == {"a", "b"}
    assert harness.step().keys() == {"c"}


def test_a_lower_priority_number_goes_first() -> None:
    harness = SchedulerHarness(seqs=1)
    harness.add("late", 3, first=50, priority=1, max_tokens=1)
    harness.add("soon", 3, first=80, priority=0, max_tokens=1)
    harness.run()
    assert harness.finished == ["soon", "late"]


def test_a_prefix_hit_is_not_scheduled_again() -> None:
    harness = SchedulerHarness()
    harness.add("a", 10, max_tokens=1)
    harness.run()
    state = harness.add("b", 10, max_tokens=1)
    assert harness.step() == {"b": (8, 2)}
    assert state.num_cached_tokens == 8


def test_identical_prompts_that_arrive_together_are_prefilled_once() -> None:
    harness = SchedulerHarness(tokens=8)
    states = [harness.add(name, 14, max_tokens=1) for name in "abc"]
    steps = harness.run()
    assert steps == [{"a": (0, 8)}, {"a": (8, 6)}, {"b": (12, 2), "c": (12, 2)}]
    assert [state.num_cached_tokens for state in states] == [0, 12, 12]


def test_others_pass_those_who_wait_for_a_prefix() -> None:
    harness = SchedulerHarness(tokens=16)
    harness.add("a", 10)
    harness.add("same", 10)
    harness.add("other", 3, first=500)
    assert harness.step() == {"other": (0, 3), "a": (0, 10)}
    assert harness.step() == {"other": (3, 1), "a": (10, 1), "same": (8, 2)}


def test_a_waiter_goes_on_when_the_one_it_waits_for_is_cancelled() -> None:
    harness = SchedulerHarness(tokens=4)
    leader = harness.add("a", 10)
    harness.add("b", 10, max_tokens=1)
    harness.step()
    harness.scheduler.finish(leader)
    assert harness.step() == {"b": (4, 4)}


def test_n_plus_one_requests_over_a_pool_that_holds_n_all_finish() -> None:
    harness = SchedulerHarness(num_blocks=1 + 3 * 4, prefix=False)
    for number in range(4):
        harness.add(f"r{number}", 8, first=number * 100, max_tokens=8)
    harness.run()
    assert sorted(harness.finished) == ["r0", "r1", "r2", "r3"]
    assert harness.blocks.num_free_blocks == 12


def test_the_last_in_rank_is_preempted_and_recomputed_with_its_output() -> None:
    harness = SchedulerHarness(num_blocks=1 + 5, tokens=32, prefix=False)
    harness.add("a", 7, first=0, max_tokens=6)
    victim = harness.add("b", 7, first=100, max_tokens=6)
    steps = harness.run()
    assert harness.scheduler.num_preemptions == 1
    assert victim.num_preemptions == 1
    assert harness.finished == ["a", "b"]
    again = [step["b"] for step in steps if "b" in step]
    assert again[0] == (0, 7)
    assert (0, 9) in again
    assert victim.output_token_ids == [7] * 6


def test_a_preempted_sequence_is_not_taken_back_only_to_be_preempted_again() -> None:
    harness = SchedulerHarness(num_blocks=1 + 8, tokens=64, prefix=False)
    for number in range(3):
        harness.add(f"r{number}", 7, first=number * 100, max_tokens=17)
    harness.run()
    assert harness.scheduler.num_preemptions <= 3


def test_who_is_behind_does_not_take_what_the_first_in_line_waits_for() -> None:
    harness = SchedulerHarness(num_blocks=1 + 4, tokens=64, prefix=False)
    harness.add("running", 8, max_tokens=3)
    harness.step()
    harness.add("big", 12, first=100)
    harness.add("small", 3, first=200)
    assert harness.step().keys() == {"running"}


def test_finishing_frees_the_blocks_at_once_wherever_the_sequence_is() -> None:
    harness = SchedulerHarness(seqs=1)
    running = harness.add("a", 10)
    waiting = harness.add("b", 10, first=100)
    harness.step()
    before = harness.blocks.num_free_blocks
    harness.scheduler.finish(waiting)
    assert harness.blocks.num_free_blocks == before
    harness.scheduler.finish(running)
    assert harness.blocks.num_free_blocks == 64
    assert not harness.scheduler.has_work


def test_a_pool_held_by_somebody_else_is_an_error_not_an_endless_loop() -> None:
    harness = SchedulerHarness(num_blocks=3)
    harness.blocks.open("foreign", harness.blocks.new_chain([], ""), list(range(8)))
    harness.add("a", 8)
    with pytest.raises(EngineFatal, match="nothing can run: 0 running, 1 waiting, 0 of 3 KV blocks free"):
        harness.scheduler.schedule()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("unified", [True, False])
def test_under_pressure_every_request_finishes_and_the_pool_ends_whole(seed: int, unified: bool) -> None:
    rng = random.Random(seed)
    harness = SchedulerHarness(num_blocks=1 + 12, seqs=5, tokens=rng.choice([5, 7, 32]), unified=unified)
    live: list[RequestState] = []
    cancelled: set[str] = set()
    for number in range(40):
        name = f"r{number}"
        length = rng.randint(1, 30)
        live.append(harness.add(name, length, first=rng.choice([0, 0, 100]), max_tokens=rng.randint(1, 48 - length)))
        for _ in range(rng.randint(0, 6)):
            harness.step()
        candidates = [state for state in live if not state.is_finished]
        if candidates and rng.random() < 0.2:
            victim = rng.choice(candidates)
            victim.finish_reason = FinishReason.CANCELLED
            harness.scheduler.finish(victim)
            cancelled.add(victim.request.request_id)
    harness.run()
    assert set(harness.finished) | cancelled == {f"r{number}" for number in range(40)}
    assert len(harness.finished) + len(cancelled) == 40
    assert all(s.num_output_tokens == s.max_tokens for s in live if s.request.request_id not in cancelled)
    assert harness.blocks.num_free_blocks == 12


def test_the_bookkeeping_needs_no_torch() -> None:
    code = (
        "import engine.scheduling.scheduler, engine.kv_cache.block_manager, engine.sampling_params, sys; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_victim_is_the_last_admitted_of_the_least_urgent() -> None:
    harness = SchedulerHarness(num_blocks=1 + 7, tokens=64, prefix=False)
    late = harness.add("less urgent", 7, first=100, max_tokens=6, priority=1)
    harness.step()
    first = harness.add("first", 7, max_tokens=6)
    harness.step()
    last = harness.add("last", 7, first=200, max_tokens=6)
    harness.run()
    assert (first.num_preemptions, last.num_preemptions) == (0, 0)
    assert late.num_preemptions == 1
    assert harness.finished == ["first", "last", "less urgent"]


def test_a_sequence_that_becomes_more_urgent_is_no_longer_the_victim() -> None:
    harness = SchedulerHarness(num_blocks=1 + 5, tokens=32, prefix=False)
    one = harness.add("a", 7, max_tokens=6)
    two = harness.add("b", 7, first=100, max_tokens=6)
    harness.step()
    harness.scheduler.promote(two, -1)
    harness.run()
    assert (one.num_preemptions, two.num_preemptions) == (1, 0)
    assert harness.finished == ["b", "a"]


def test_groups_run_in_turn_if_the_pool_is_too_small_for_two_prefixes() -> None:
    harness = SchedulerHarness(num_blocks=1 + 16, seqs=3, tokens=64)
    states = [
        harness.add(f"{group}/{number}", 34, first=group * 1000, max_tokens=3)
        for number in range(6)
        for group in range(4)
    ]
    for number, state in enumerate(states):  # the last two tokens tell the members of a group apart
        state.token_ids[-2:] = [5000 + number, 6000 + number]
    harness.run()
    groups = [name.split("/")[0] for name in harness.finished]
    assert sum(one != two for one, two in pairwise(groups)) == 3
    assert sum(state.num_cached_tokens for state in states) == 20 * 32
    assert harness.scheduler.num_preemptions == 0
