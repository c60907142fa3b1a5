"""Blocks that waiting sequences will need go last, and still never a parent before its child."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.errors import EngineFatal, KVPoolExhausted
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.block_pool import BlockPool, CachedBlock

BLOCK = 4


class WantedBlocksMachine(RuleBasedStateMachine):
    """In any order of waiting, running and ending, children go before parents and the account adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(14, BLOCK, prefix_caching=True)
        self.waiting: list[list[int]] = []
        self.running: dict[str, list[int]] = {}
        self.count = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def wait(self, tokens: list[int]) -> None:
        self.waiting.append(tokens)
        self.manager.want(self.manager.new_chain(tokens, ""))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            tokens = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
            self.manager.unwant(self.manager.new_chain(tokens, ""))

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        if not self.waiting:
            return
        position = data.draw(st.integers(0, len(self.waiting) - 1))
        tokens, chain = self.waiting[position], self.manager.new_chain(self.waiting[position], "")
        self.count += 1
        name = str(self.count)
        try:
            self.manager.open(name, chain, tokens)
        except KVPoolExhausted:
            return
        del self.waiting[position]
        self.manager.unwant(chain)
        self.running[name] = tokens
        self.manager.commit(name, tokens, data.draw(st.integers(0, len(tokens))))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            name = data.draw(st.sampled_from(sorted(self.running)))
            del self.running[name]
            self.manager.free(name)

    @invariant()
    def the_account_adds_up(self) -> None:
        self.manager.check_integrity(self.manager.new_chain(tokens, "") for tokens in self.waiting)

    @invariant()
    def children_go_before_their_parents(self) -> None:
        pool = self.manager._pool
        order = [pool._registered[block_id] for block_id in (*pool._unwanted, *pool._wanted)]
        place = {block.digest: position for position, block in enumerate(order)}
        assert all(place[block.digest] < place.get(block.parent, len(order)) for block in order)


TestWantedBlocksMachine = WantedBlocksMachine.TestCase
TestWantedBlocksMachine.settings = hypothesis_settings(max_examples=100, stateful_step_count=40, deadline=None)


def _pool_with(*names: str) -> BlockPool:
    """A pool full of registered free blocks, the first name the oldest."""
    pool = BlockPool(len(names) + 1)
    for block_id, name in zip(pool.allocate(len(names)), names, strict=True):
        pool.register(CachedBlock(block_id, name.encode(), b"parent", (1, 2, 3, 4)))
    for block_id in range(1, len(names) + 1):
        pool.release(block_id)
    return pool


def _run(manager: BlockManager, name: str, tokens: list[int]) -> int:
    cached = manager.open(name, manager.new_chain(tokens, ""), tokens)
    manager.commit(name, tokens, len(tokens))
    manager.free(name)
    return cached


def test_the_wanted_are_taken_last_each_kind_oldest_first() -> None:
    pool = _pool_with("a", "b", "c", "d")
    pool.want([b"a"])
    pool.want([b"b"])
    assert pool.allocate(4) == [3, 4, 1, 2]


def test_what_nobody_wants_any_more_is_as_good_as_the_rest() -> None:
    pool = _pool_with("a", "b", "c")
    pool.want([b"a"])
    pool.want([b"a"])
    pool.unwant([b"a"])
    pool.check_integrity({b"a": 1})
    pool.unwant([b"a"])
    pool.check_integrity({})
    assert pool.allocate(3) == [2, 3, 1]


def test_a_block_that_is_wanted_while_held_is_spared_once_it_is_free() -> None:
    pool = _pool_with("a", "b")
    pool.acquire(1)
    pool.want([b"a"])
    pool.release(1)
    assert pool.allocate(1) == [2]


def test_a_digest_may_be_wanted_before_anybody_computed_it() -> None:
    pool = BlockPool(3)
    pool.want([b"a"])
    pool.allocate(2)
    for block_id, name in ((1, b"a"), (2, b"b")):
        pool.register(CachedBlock(block_id, name, b"parent", (1, 2, 3, 4)))
        pool.release(block_id)
    assert pool.allocate(1) == [2]


def test_a_child_that_is_wanted_later_than_its_parent_is_still_taken_first() -> None:
    pool = _pool_with("grandchild", "child", "root")
    pool.want([b"root"])
    pool.want([b"root", b"child"])
    assert pool.allocate(3) == [1, 2, 3]


def test_prefixes_of_waiting_sequences_survive_a_flood_of_others() -> None:
    manager = BlockManager(20, BLOCK, prefix_caching=True)
    prefix = list(range(16))
    _run(manager, "first", [*prefix, 1])
    chain = manager.new_chain([*prefix, 2], "")
    manager.want(chain)
    for number in range(30):
        _run(manager, str(number), [100 + number] * 9)
    manager.check_integrity([chain])
    assert _run(manager, "second", [*prefix, 2]) == 16


def test_the_integrity_check_sees_what_is_wanted_and_not_counted() -> None:
    manager = BlockManager(20, BLOCK, prefix_caching=True)
    manager.want(manager.new_chain(list(range(9)), ""))
    with pytest.raises(EngineFatal, match="what is wanted is miscounted"):
        manager.check_integrity()


def test_long_random_lives_keep_the_order_and_the_account() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        machine = WantedBlocksMachine()
        roots = [[rng.randint(0, 1) for _ in range(16)] for _ in range(3)]
        for _ in range(300):
            roll = rng.random()
            if roll < 0.4:
                machine.waiting.append(
                    [*rng.choice(roots)[: rng.randint(1, 16)], *[rng.randint(0, 1)] * rng.randint(0, 8)]
                )
                machine.manager.want(machine.manager.new_chain(machine.waiting[-1], ""))
            elif roll < 0.7 and machine.waiting:
                _admit_one(machine, rng)
            elif machine.running:
                name = rng.choice(sorted(machine.running))
                del machine.running[name]
                machine.manager.free(name)
            machine.the_account_adds_up()
            machine.children_go_before_their_parents()


def _admit_one(machine: WantedBlocksMachine, rng: random.Random) -> None:
    tokens = machine.waiting.pop(rng.randrange(len(machine.waiting)))
    chain = machine.manager.new_chain(tokens, "")
    machine.count += 1
    name = str(machine.count)
    try:
        machine.manager.open(name, chain, tokens)
    except KVPoolExhausted:
        machine.manager.unwant(chain)
        return
    machine.manager.unwant(chain)
    machine.running[name] = tokens
    machine.manager.commit(name, tokens, len(tokens))
