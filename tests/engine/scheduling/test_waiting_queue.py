"""The order of what waits: priorities, tenants' shares, and a sweep over prefixes that starves no sequence."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from engine.kv_cache.block_manager import BlockHashChain
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import RequestState
from engine.scheduling.waiting_queue import PrefixSweep, SchedulerLimits, WaitingQueue
from tests.support.engines import make_request

QUANTUM = 10

BLOCK = 2


class QueueHarness:
    """A queue whose sequences cost what the test says."""

    def __init__(self) -> None:
        self.queue: WaitingQueue[RequestState] = WaitingQueue(SchedulerLimits(4, 4 * QUANTUM, True))
        self._arrivals = 0

    def add(self, tenant: str, *, priority: int = 0, count: int = 1, tokens: tuple[int, ...] = (1,)) -> None:
        for _ in range(count):
            self._arrivals += 1
            request = Request(str(self._arrivals), tokens, SamplingParams(), priority, tenant)
            chain = BlockHashChain(1, tenant)
            chain.extend(tokens)
            state = RequestState(
                request=request,
                index=0,
                arrival=self._arrivals,
                seed=0,
                max_tokens=1,
                chain=chain,
                token_ids=list(tokens),
            )
            self.queue.add(state)

    def admit(self, count: int, cost: int = 1) -> list[RequestState]:
        """Admit up to `count` sequences in one step, each at `cost` tokens."""
        admitted: list[RequestState] = []
        for state in self.queue.candidates(lambda _: None):
            self.queue.admit(state)
            self.queue.charge(state, cost)
            admitted.append(state)
            if len(admitted) == count:
                break
        return admitted

    def tenants(self, count: int, cost: int = 1) -> str:
        return "".join(state.request.tenant for state in self.admit(count, cost))


def test_a_more_urgent_tier_is_emptied_first_whoever_is_in_it() -> None:
    harness = QueueHarness()
    harness.add("a", priority=1, count=3)
    harness.add("b", priority=0, count=3)
    harness.add("c", priority=-1)
    assert harness.tenants(7) == "cbbbaaa"
    assert len(harness.queue) == 0


def test_tenants_take_turns_of_a_quantum() -> None:
    harness = QueueHarness()
    harness.add("a", count=100)
    harness.add("b", count=100)
    assert harness.tenants(12, cost=5) == "aabbbbaaaabb"


def test_a_turn_goes_on_in_the_next_step() -> None:
    harness = QueueHarness()
    harness.add("a", count=100)
    harness.add("b", count=100)
    assert "".join(harness.tenants(1, cost=2) for _ in range(15)) == "aaaaa" + "bbbbbbbbbb"


def test_shares_are_equal_in_tokens_not_in_requests() -> None:
    harness = QueueHarness()
    for tenant in "abc":
        harness.add(tenant, count=1000)
    cost = {"a": 1, "b": 4, "c": 16}
    served: Counter[str] = Counter()
    for _ in range(600):
        (state,) = harness.admit(1, cost=0)
        tenant = state.request.tenant
        harness.queue.charge(state, cost[tenant])
        served[tenant] += cost[tenant]
    assert max(served.values()) - min(served.values()) <= QUANTUM + 16


def test_tokens_run_later_count_as_well() -> None:
    harness = QueueHarness()
    harness.add("a", count=50)
    harness.add("b", count=50)
    (first,) = harness.admit(1, cost=0)
    harness.queue.charge(first, 1000)  # it generates for a long time
    assert harness.tenants(50, cost=15) == "b" * 50


def test_an_idle_tenant_saves_nothing_up() -> None:
    harness = QueueHarness()
    harness.add("a", count=300)
    harness.add("b")
    harness.admit(200, cost=QUANTUM)
    harness.add("b", count=50)  # had its one sequence long ago
    assert sorted(Counter(harness.tenants(40, cost=QUANTUM)).values()) == [20, 20]


def test_a_tenant_that_is_ahead_stays_ahead_when_it_comes_back() -> None:
    harness = QueueHarness()
    harness.add("a", count=50)
    harness.add("b")
    (first,) = harness.admit(1, cost=0)
    assert first.request.tenant == "a"
    states = harness.admit(1, cost=10)
    while states[0].request.tenant != "b":
        states = harness.admit(1, cost=10)
    harness.queue.charge(states[0], 10_000)
    harness.add("b", count=5)
    assert harness.tenants(30, cost=10) == "a" * 30


def test_within_a_tenant_prefixes_stay_together_across_turns() -> None:
    harness = QueueHarness()
    for tokens in [(1, 2), (3, 4), (1, 5), (3, 6), (1, 7), (3, 8)]:
        harness.add("a", tokens=tokens)
        harness.add("b", tokens=tokens)
    firsts = {"a": "", "b": ""}
    while len(harness.queue):
        for state in harness.admit(1, cost=7):
            firsts[state.request.tenant] += str(state.token_ids[0])
    assert all(order in ("111333", "333111") for order in firsts.values())


def test_the_preempted_come_first_in_the_order_of_their_admission() -> None:
    harness = QueueHarness()
    harness.add("a", count=4)
    one, two = harness.admit(2)
    one.admission, two.admission = 1, 2
    for state in (two, one):
        harness.queue.add(state)
    assert harness.admit(2) == [one, two]
    assert len(harness.queue) == 2


def test_a_sequence_can_leave_wherever_it_waits() -> None:
    harness = QueueHarness()
    harness.add("a", count=2)
    harness.add("b", priority=3)
    preempted, *_ = harness.admit(1)
    preempted.admission = 1
    harness.queue.add(preempted)
    for state in list(harness.queue):
        harness.queue.remove(state)
    assert (len(harness.queue), list(harness.queue.candidates(lambda _: None))) == (0, [])


class SweepHarness:
    """A sweep over sequences named by their tokens."""

    def __init__(self, max_overtakes: int = 1000) -> None:
        self.sweep: PrefixSweep[RequestState] = PrefixSweep(max_overtakes)
        self.blocked: dict[bytes, None] = {}  # digests of blocks that another sequence computes
        self._arrivals = 0

    def add(self, tokens: Sequence[int]) -> RequestState:
        chain = BlockHashChain(BLOCK, "")
        chain.extend(tokens)
        self._arrivals += 1
        request = make_request(str(self._arrivals), tokens)
        state = RequestState(
            request=request, index=0, arrival=self._arrivals, seed=0, max_tokens=1, chain=chain, token_ids=list(tokens)
        )
        self.sweep.add(state)
        return state

    def admit(self, count: int = 1) -> list[tuple[int, ...]]:
        """Admit up to `count` in one walk; their tokens."""
        admitted: list[tuple[int, ...]] = []
        for state in self.sweep.walk(self._blocked_at):
            self.sweep.admit(state)
            admitted.append(tuple(state.token_ids))
            if len(admitted) == count:
                break
        return admitted

    def _blocked_at(self, state: RequestState) -> int | None:
        return next((i for i, digest in enumerate(state.chain.digests) if digest in self.blocked), None)


def _random_tree(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Prompts of up to five blocks over a small alphabet: many shared prefixes, some prompts twice."""
    return [tuple(rng.randint(0, 1) for _ in range(BLOCK * rng.randint(0, 5))) for _ in range(count)]


def _assert_depth_first(order: Sequence[tuple[int, ...]]) -> None:
    """Sequences that share a prefix come together: no prefix is met again after it was left."""
    for length in range(BLOCK, 5 * BLOCK + 1, BLOCK):
        met: list[tuple[int, ...]] = []
        for tokens in order:
            prefix = tokens[:length] if len(tokens) >= length else ()
            if prefix and (not met or met[-1] != prefix):
                assert prefix not in met
                met.append(prefix)
            elif not prefix:
                met.append(())


def test_every_prefix_is_met_once() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        harness = SweepHarness()
        for tokens in _random_tree(rng, 60):
            harness.add(tokens)
        order: list[tuple[int, ...]] = []
        while len(harness.sweep):
            order += harness.admit(rng.randint(1, 5))
        _assert_depth_first(order)


def test_equal_prefixes_stand_in_order_of_arrival() -> None:
    harness = SweepHarness()
    for last in (9, 3, 5):
        harness.add((1, 1, last))
    assert harness.admit(3) == [(1, 1, 9), (1, 1, 3), (1, 1, 5)]


def test_who_arrives_in_the_subtree_at_hand_is_taken_before_it_is_left() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        harness = SweepHarness()
        for tokens in _random_tree(rng, 30):
            harness.add(tokens)
        order = harness.admit(10)
        at = order[-1][:BLOCK]
        if not at:
            continue
        late = [(*at, *tokens) for tokens in _random_tree(rng, 5)]
        for tokens in late:
            harness.add(tokens)
        rest = harness.admit(1000)
        in_subtree = [tokens[:BLOCK] == at for tokens in rest]
        assert in_subtree == sorted(in_subtree, reverse=True)
        assert sum(in_subtree) >= len(late)


def test_who_arrives_elsewhere_behind_the_sweep_waits_for_the_next_one() -> None:
    harness = SweepHarness()
    for first in range(20):
        harness.add((first, first, 7))
    order = harness.admit(10)
    harness.add(order[2])
    rest = harness.admit(1000)
    assert rest[-1] == order[2]
    assert len(rest) == 11


def test_who_waits_for_a_block_is_passed_over_and_first_in_the_next_walk() -> None:
    harness = SweepHarness()
    group = [harness.add((1, 1, 2, 2, number)) for number in range(50)]
    others = [harness.add((first, first, first)) for first in range(3, 8)]
    first = harness.admit(1)
    harness.blocked = {group[0].chain.digests[1]: None}
    if first == [(1, 1, 2, 2, 0)]:
        assert harness.admit(3) == [tuple(state.token_ids) for state in sorted(others, key=_digests)][:3]
    else:  # the others happen to come before the group
        assert set(harness.admit(1000)) == {tuple(state.token_ids) for state in others} - set(first)
    harness.blocked = {}
    assert [tokens[:4] for tokens in harness.admit(49)] == [(1, 1, 2, 2)] * 49


def _digests(state: RequestState) -> list[bytes]:
    return state.chain.digests


def test_all_who_wait_for_one_block_cost_one_look() -> None:
    harness = SweepHarness()
    states = [harness.add((1, 1, number, number)) for number in range(500)]
    looked_at: list[RequestState] = []

    def blocked_at(state: RequestState) -> int | None:
        looked_at.append(state)
        return 0

    assert list(harness.sweep.walk(blocked_at)) == []
    assert len(looked_at) == 1
    assert len(harness.sweep) == len(states)


def test_nobody_is_passed_by_more_than_max_overtakes_later_arrivals() -> None:
    harness = SweepHarness(max_overtakes=10)
    harness.add((1, 1, 1))
    harness.add((1, 1, 1))
    harness.add((2, 2, 2))
    admitted = harness.admit(1)
    for _ in range(30):
        harness.add(admitted[0])  # new ones keep arriving in this subtree
        admitted += harness.admit(1)
    assert {(1, 1, 1), (2, 2, 2)} == set(admitted[:14])  # after the three of the beginning, ten more


def test_a_sequence_that_leaves_is_not_handed_out() -> None:
    harness = SweepHarness()
    states = [harness.add((1, 1, number)) for number in range(5)]
    harness.sweep.remove(states[2])
    assert harness.admit(10) == [(1, 1, number) for number in (0, 1, 3, 4)]
