"""Depth first over the prefixes of what waits, and nobody left behind for ever."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.kv_cache.block_manager import BlockHashChain
from engine.scheduling.sequence import RequestState
from engine.scheduling.waiting_queue import PrefixSweep
from tests.support.factories import make_request

BLOCK = 2


class SweepHarness:
    """A sweep over sequences named by their tokens."""

    def __init__(self, max_overtakes: int = 1000) -> None:
        self.sweep: PrefixSweep[RequestState] = PrefixSweep(max_overtakes)
        self.blocked: dict[bytes, None] = {}  # digests that somebody computes
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
    """Whoever shares a prefix stands together: no prefix is met again after it was left."""
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


def test_those_who_wait_for_a_block_are_passed_over_and_come_first_in_the_next_walk() -> None:
    harness = SweepHarness()
    group = [harness.add((1, 1, 2, 2, number)) for number in range(50)]
    others = [harness.add((first, first, first)) for first in range(3, 8)]
    first = harness.admit(1)
    harness.blocked = {group[0].chain.digests[1]: None}
    if first == [(1, 1, 2, 2, 0)]:
        assert harness.admit(3) == [tuple(state.token_ids) for state in sorted(others, key=_digests)][:3]
    else:  # the others happen to stand before the group
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
        harness.add(admitted[0])  # somebody always feeds the subtree at hand
        admitted += harness.admit(1)
    assert {(1, 1, 1), (2, 2, 2)} == set(admitted[:14])  # after the three of the beginning, ten more


def test_a_sequence_that_leaves_is_not_handed_out() -> None:
    harness = SweepHarness()
    states = [harness.add((1, 1, number)) for number in range(5)]
    harness.sweep.remove(states[2])
    assert harness.admit(10) == [(1, 1, number) for number in (0, 1, 3, 4)]
