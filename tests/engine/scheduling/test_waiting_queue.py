"""Priorities before tenants, tenants before prefixes."""

from __future__ import annotations

from collections import Counter

from engine.kv_cache.block_manager import BlockHashChain
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import RequestState
from engine.scheduling.waiting_queue import SchedulerLimits, WaitingQueue

QUANTUM = 10


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
        """Admit so many, in one step, each at `cost` tokens."""
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
