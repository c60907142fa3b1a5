"""Sharing, growing and giving back blocks, block by block."""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.errors import EngineFatal, InvalidRequest, KVPoolExhausted
from engine.kv_cache.block_manager import BlockManager

BLOCK = 4


class BlockManagerMachine(RuleBasedStateMachine):
    """Any order of calls leaves every block accounted for and finds only true prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = _manager(12)
        self.live: dict[str, list[int]] = {}
        self.computed: set[tuple[int, ...]] = set()
        self.count = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def open(self, tokens: list[int]) -> None:
        self.count += 1
        name = str(self.count)
        try:
            cached = self.manager.open(name, self.manager.new_chain(tokens, ""), tokens)
        except KVPoolExhausted:
            return
        assert cached % BLOCK == 0
        assert cached < len(tokens)
        assert cached == 0 or tuple(tokens[:cached]) in self.computed
        self.live[name] = tokens

    @rule(data=st.data(), computed=st.integers(0, 20))
    def commit(self, data: st.DataObject, computed: int) -> None:
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            tokens = self.live[name]
            computed = min(computed, len(tokens))
            self.manager.commit(name, tokens, computed)
            self.computed |= {tuple(tokens[:end]) for end in range(BLOCK, computed + 1, BLOCK)}

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=6))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            try:
                self.manager.grow(name, len(self.live[name]) + len(more))
            except KVPoolExhausted:
                return
            self.live[name] = [*self.live[name], *more]

    @rule(data=st.data(), trusted=st.booleans())
    def end(self, data: st.DataObject, trusted: bool) -> None:
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            del self.live[name]
            if trusted:
                self.manager.free(name)
            else:
                self.manager.discard(name)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.manager.check_integrity()
        for name, tokens in self.live.items():
            assert len(self.manager.block_table(name)) == self.manager.blocks_for(len(tokens))


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)


def _manager(num_blocks: int = 9, *, prefix_caching: bool = True) -> BlockManager:
    return BlockManager(num_blocks, BLOCK, prefix_caching=prefix_caching)


def _run(manager: BlockManager, sequence_id: str, tokens: list[int], salt: str = "") -> int:
    """Open a sequence and compute all of it."""
    cached = manager.open(sequence_id, manager.new_chain(tokens, salt), tokens)
    manager.commit(sequence_id, tokens, len(tokens))
    return cached


def test_a_prompt_gets_blocks_for_all_its_tokens() -> None:
    manager = _manager()
    assert _run(manager, "a", list(range(9))) == 0
    assert list(manager.block_table("a")) == [1, 2, 3]


def test_a_shared_prefix_is_shared_by_block_and_the_rest_is_new() -> None:
    manager = _manager()
    _run(manager, "a", list(range(10)))
    assert _run(manager, "b", [*range(8), 90, 91]) == 8
    assert list(manager.block_table("b")) == [1, 2, 4]


def test_only_full_blocks_are_found() -> None:
    manager = _manager()
    _run(manager, "a", list(range(7)))
    assert _run(manager, "b", [*range(7), 70]) == 4


def test_the_last_token_is_computed_so_no_shared_block_is_written() -> None:
    manager = _manager()
    tokens = list(range(8))
    _run(manager, "a", tokens)
    assert manager.open("b", manager.new_chain(tokens, ""), tokens) == 4
    assert list(manager.block_table("b")) == [1, 3]


def test_a_block_computed_twice_is_held_once_from_then_on() -> None:
    manager = _manager()
    _run(manager, "a", list(range(8)))
    _run(manager, "b", list(range(8)))
    assert list(manager.block_table("b")) == [1, 2]
    assert manager.num_free_blocks == 6
    manager.free("a")
    _run(manager, "c", [*range(8), 80, 81, 82, 83])
    for name in "bc":
        manager.free(name)
    _run(manager, "d", list(range(100, 132)))
    assert manager.metrics(1).evictions == 3


def test_the_prefix_survives_the_end_of_its_sequence_and_idleness() -> None:
    manager = _manager()
    _run(manager, "a", list(range(10)))
    manager.free("a")
    assert manager.num_free_blocks == 8
    assert _run(manager, "b", list(range(10))) == 8


def test_what_was_not_committed_is_not_found() -> None:
    manager = _manager()
    tokens = list(range(10))
    manager.open("a", manager.new_chain(tokens, ""), tokens)
    manager.commit("a", tokens, 5)
    manager.free("a")
    assert _run(manager, "b", tokens) == 4


def test_generated_tokens_are_found_too() -> None:
    manager = _manager()
    tokens = list(range(6))
    _run(manager, "a", tokens)
    longer = [*tokens, 60, 61, 62]
    manager.grow("a", len(longer))
    manager.commit("a", longer, 8)
    manager.free("a")
    assert _run(manager, "b", longer) == 8


def test_salts_keep_tenants_apart() -> None:
    manager = _manager()
    _run(manager, "a", list(range(10)), salt="one")
    assert _run(manager, "b", list(range(10)), salt="two") == 0


def test_nothing_is_found_with_the_prefix_cache_off() -> None:
    manager = _manager(prefix_caching=False)
    _run(manager, "a", list(range(10)))
    assert _run(manager, "b", list(range(10))) == 0
    assert manager.metrics(1).registered_blocks == 0


def test_a_digest_collision_is_told_apart_by_the_tokens() -> None:
    manager = _manager()
    _run(manager, "a", list(range(10)))
    impostor = [50, 51, 52, 53, 54]
    chain = manager.new_chain(impostor, "")
    chain.digests[0] = manager.new_chain(list(range(10)), "").digests[0]
    assert manager.open("b", chain, impostor) == 0


def test_children_are_evicted_before_their_parents() -> None:
    manager = _manager(5)
    _run(manager, "a", list(range(16)))
    manager.free("a")
    _run(manager, "b", list(range(100, 104)))
    manager.free("b")
    assert _run(manager, "c", list(range(16))) == 12
    assert manager.metrics(1).evictions == 2


def test_hits_are_pinned_before_the_remainder_is_allocated() -> None:
    manager = _manager(4)
    _run(manager, "a", list(range(12)))
    manager.free("a")
    assert _run(manager, "b", [*range(8), 80, 81]) == 8


def test_a_failed_open_changes_nothing() -> None:
    manager = _manager(5)
    _run(manager, "a", list(range(8)))
    before = manager.metrics(1)
    tokens = [*range(8), *range(50, 62)]
    with pytest.raises(KVPoolExhausted) as caught:
        manager.open("b", manager.new_chain(tokens, ""), tokens)
    assert (caught.value.need, caught.value.free) == (3, 2)
    assert manager.metrics(1) == before
    manager.check_integrity()


def test_a_failed_growth_changes_nothing() -> None:
    manager = _manager(3)
    _run(manager, "a", list(range(8)))
    with pytest.raises(KVPoolExhausted):
        manager.grow("a", 9)
    assert list(manager.block_table("a")) == [1, 2]


def test_a_block_is_pending_until_it_is_committed_or_given_up() -> None:
    manager = _manager(20)
    tokens = list(range(12))
    chain = manager.new_chain(tokens, "")
    manager.open("a", manager.new_chain(tokens, ""), tokens)
    assert manager.pending_block(chain, tokens) == 0
    manager.commit("a", tokens, 4)
    assert manager.pending_block(chain, tokens) == 1
    manager.commit("a", tokens, 8)
    assert manager.pending_block(chain, tokens) is None
    other = [*range(4), *range(40, 48)]
    manager.open("b", manager.new_chain(other, ""), other)
    assert manager.pending_block(manager.new_chain(other, ""), other) == 1
    manager.free("b")
    assert manager.pending_block(manager.new_chain(other, ""), other) is None


def test_discarded_blocks_are_never_found_again_nor_are_those_it_shared() -> None:
    manager = _manager(20)
    _run(manager, "first", list(range(5)))
    tokens = [*range(4), *range(40, 50)]
    assert _run(manager, "bad", tokens) == 4
    manager.discard("bad")
    assert _run(manager, "again", tokens) == 0
    manager.check_integrity()


def test_the_blocks_an_opening_takes_are_known_beforehand() -> None:
    manager = _manager(20)
    _run(manager, "a", list(range(12)))
    tokens = [*range(8), 80, 81, 82, 83, 84]
    for held in (True, False):
        chain = manager.new_chain(tokens, "")
        need, free = manager.blocks_needed(chain, tokens), manager.num_free_blocks
        assert need == (2 if held else 4)
        manager.open("b", chain, tokens)
        assert free - manager.num_free_blocks == need
        manager.free("b")
        manager.free("a")


def test_freeing_twice_or_an_unknown_sequence_does_nothing() -> None:
    manager = _manager()
    _run(manager, "a", list(range(5)))
    for _ in range(2):
        manager.free("a")
    manager.free("never seen")
    manager.discard("never seen")
    assert manager.num_free_blocks == 8


def test_a_sequence_opens_once() -> None:
    manager = _manager()
    _run(manager, "a", [1, 2])
    with pytest.raises(InvalidRequest, match="holds blocks already"):
        _run(manager, "a", [1, 2])


def test_growing_a_sequence_that_holds_nothing_is_fatal() -> None:
    with pytest.raises(EngineFatal, match="'a' holds no blocks"):
        _manager().grow("a", 1)


def test_the_metrics_are_counted_not_constant() -> None:
    manager = _manager(4)
    _run(manager, "a", list(range(9)))
    manager.free("a")
    _run(manager, "b", list(range(9)))
    manager.free("b")
    _run(manager, "c", list(range(50, 62)))
    found = manager.metrics(bytes_per_block=100)
    assert (found.probes, found.hits, found.queried_tokens, found.saved_prefill_tokens) == (3, 1, 30, 8)
    assert (found.evictions, found.registered_blocks, found.registered_bytes) == (2, 3, 300)
    assert (found.used_blocks, found.free_blocks) == (3, 0)


def test_the_integrity_check_sees_a_reference_nobody_holds() -> None:
    manager = _manager()
    manager._pool.allocate(1)
    with pytest.raises(EngineFatal, match="1 references, 0 holders"):
        manager.check_integrity()


def test_a_sequence_that_must_compute_more_shares_less_and_is_still_found() -> None:
    manager = BlockManager(20, 4, prefix_caching=True)
    tokens = list(range(13))
    chain = manager.new_chain(tokens, "")
    manager.open("a", manager.new_chain(tokens[:10], ""), tokens[:10])
    manager.commit("a", tokens, 10)
    assert [manager.open(f"limit {limit}", chain, tokens, limit) for limit in (0, 7, 13)] == [0, 4, 8]
    for limit in (0, 7, 13):
        manager.free(f"limit {limit}")
    assert [manager.blocks_needed(chain, tokens, limit) for limit in (0, 7, 13, None)] == [4, 3, 2, 2]
    manager.open("computing", chain, tokens)
    assert [manager.pending_block(chain, tokens, limit) for limit in (0, 11, 12, None)] == [None, None, 2, 2]
    manager.open("again", chain, tokens, 0)
    manager.commit("again", tokens, 13)
    assert manager.pending_block(chain, tokens) is None
    for sequence_id in ("computing", "again", "a"):
        manager.free(sequence_id)
    manager.check_integrity()
    assert manager.open("b", chain, tokens) == 12
