"""What is scheduled while the step before is under way."""

from __future__ import annotations

from engine.kv_cache.block_manager import BlockManager
from engine.request import FinishReason
from engine.scheduling.scheduler import ScheduledBatch, Scheduler
from engine.scheduling.sequence import RequestState, TokenCounts
from engine.scheduling.waiting_queue import SchedulerLimits
from tests.support.factories import make_request, make_state

BLOCK = 4


class Harness:
    """A scheduler whose model answers token 7, when it is asked to."""

    def __init__(self, *, num_blocks: int = 65, tokens: int = 16) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK, prefix_caching=True)
        self.scheduler = Scheduler(SchedulerLimits(8, tokens, True), self.blocks)
        self._arrivals = 0

    def add(self, name: str, prompt_len: int, *, first: int = 0, max_tokens: int = 8) -> RequestState:
        self._arrivals += 1
        request = make_request(name, range(first, first + prompt_len), max_tokens=max_tokens)
        state = make_state(request, self.blocks, self._arrivals)
        self.scheduler.add(state)
        return state

    def schedule(self, *, is_ahead: bool = True) -> ScheduledBatch:
        batch = self.scheduler.schedule(is_ahead=is_ahead)
        assert batch is not None
        self.scheduler.check_integrity()
        return batch

    def collect(self, batch: ScheduledBatch) -> None:
        self.scheduler.commit(batch.items)
        for item in batch.items:
            if item.samples and not item.state.is_finished:
                item.state.token_ids.append(7)
        self.scheduler.check_integrity()


def _places(batch: ScheduledBatch) -> dict[str, tuple[int, int]]:
    return {item.state.request.request_id: (item.start, item.num_scheduled_tokens) for item in batch.items}


def test_a_pending_token_is_scheduled_by_its_place_and_one_at_a_time() -> None:
    harness = Harness()
    state = harness.add("a", 6)
    first = harness.schedule(is_ahead=False)
    second = harness.schedule()
    assert (_places(first), _places(second)) == ({"a": (0, 6)}, {"a": (6, 1)})
    harness.collect(first)
    third = harness.schedule()
    assert _places(third) == {"a": (7, 1)}
    harness.collect(second)
    harness.collect(third)
    assert (len(state.token_ids), state.num_pending_tokens, state.num_uncomputed_tokens) == (9, 0, 1)


def test_a_prompt_goes_on_in_chunks_before_the_last_one_is_known_to_be_good() -> None:
    harness = Harness(tokens=8)
    harness.add("a", 20)
    batches = [harness.schedule(is_ahead=False), harness.schedule()]
    harness.collect(batches[0])
    batches.append(harness.schedule())
    assert [_places(batch)["a"] for batch in batches] == [(0, 8), (8, 8), (16, 4)]


def test_nobody_hits_a_block_of_a_step_that_is_under_way() -> None:
    harness = Harness()
    harness.add("a", 10)
    first = harness.schedule(is_ahead=False)
    harness.add("b", 10)
    second = harness.schedule()
    assert _places(second) == {"a": (10, 1)}
    harness.collect(first)
    assert _places(harness.schedule()) == {"a": (11, 1), "b": (8, 2)}


def test_a_sequence_is_not_run_beyond_its_last_token() -> None:
    harness = Harness()
    harness.add("a", 6, max_tokens=1)
    harness.add("b", 6, first=50, max_tokens=2)
    harness.schedule(is_ahead=False)
    assert _places(harness.schedule()) == {"b": (6, 1)}
    harness = Harness()
    harness.add("a", 6, max_tokens=1)
    harness.schedule(is_ahead=False)
    assert harness.scheduler.schedule(is_ahead=True) is None


def test_nobody_is_preempted_for_a_step_ahead_but_for_the_one_after_it() -> None:
    harness = Harness(num_blocks=1 + 4, tokens=32)
    for first in (0, 100):
        harness.add(str(first), 7, first=first)
    under_way = harness.schedule(is_ahead=False)
    ahead = harness.schedule()  # the eighth token of each has room
    assert len(ahead.items) == 2
    harness.collect(under_way)
    assert harness.scheduler.schedule(is_ahead=True) is None
    assert harness.scheduler.num_preemptions == 0
    harness.collect(ahead)
    assert len(harness.schedule(is_ahead=False).items) == 1
    assert harness.scheduler.num_preemptions == 1


def test_blocks_that_just_suffice_are_taken_ahead() -> None:
    harness = Harness(num_blocks=1 + 5, tokens=32)
    harness.add("grows", 8)
    harness.add("has room", 6, first=100)
    harness.schedule(is_ahead=False)
    assert harness.blocks.num_free_blocks == 1
    assert len(harness.schedule().items) == 2
    assert harness.blocks.num_free_blocks == 0


def test_one_sequence_that_needs_its_answer_holds_the_step_back() -> None:
    harness = Harness()
    harness.add("a", 6)
    state = harness.add("b", 6, first=50)
    state.counts = TokenCounts(state.token_ids)
    under_way = harness.schedule(is_ahead=False)
    assert harness.scheduler.schedule(is_ahead=True) is None
    harness.collect(under_way)
    assert len(harness.schedule().items) == 2


def test_what_ended_while_its_step_was_under_way_is_left_out() -> None:
    harness = Harness()
    state = harness.add("a", 9)
    under_way = [harness.schedule(is_ahead=False), harness.schedule()]
    state.finish_reason = FinishReason.CANCELLED
    harness.scheduler.finish(state)
    assert harness.blocks.num_free_blocks == 64
    for batch in under_way:
        harness.collect(batch)
    assert not harness.scheduler.has_work
    assert harness.blocks.metrics(1).registered_blocks == 0
