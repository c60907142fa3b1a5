"""The block pool: exact ids, exact order, nothing lost."""

from __future__ import annotations

import pytest

from engine.errors import EngineFatal, KVPoolExhausted
from engine.kv_cache.block_pool import BlockPool, CachedBlock


def _block(block_id: int, name: str) -> CachedBlock:
    return CachedBlock(block_id, name.encode(), b"parent", (1, 2, 3, 4))


def test_blocks_are_handed_out_in_order_and_the_null_block_never_is() -> None:
    pool = BlockPool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_an_allocation_too_large_takes_nothing_and_says_need_and_free() -> None:
    pool = BlockPool(4)
    with pytest.raises(KVPoolExhausted) as caught:
        pool.allocate(4)
    assert (caught.value.need, caught.value.free) == (4, 3)
    assert pool.allocate(3) == [1, 2, 3]


def test_blank_blocks_are_taken_first_then_registered_ones_oldest_first() -> None:
    pool = BlockPool(5)
    pool.allocate(4)
    for block_id, name in ((1, "a"), (3, "b")):
        assert pool.register(_block(block_id, name))
    for block_id in (3, 1, 4, 2):
        pool.release(block_id)
    assert pool.allocate(2) == [2, 4]
    assert pool.num_evictions == 0
    assert pool.allocate(1) == [3]
    assert pool.lookup(b"b") is None
    assert pool.lookup(b"a") is not None
    assert pool.num_evictions == 1


def test_blocks_that_were_in_use_are_taken_before_those_that_never_were() -> None:
    pool = BlockPool(1000)
    taken: set[int] = set()
    for _ in range(20):
        table = pool.allocate(30)
        taken.update(table)
        for block_id in reversed(table):  # tail first, as the manager frees a sequence
            pool.release(block_id)
    assert taken == set(range(1, 31))
    assert pool.allocate(31) == list(range(1, 32))


def test_a_freed_registered_block_is_resurrected_with_its_content() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.register(_block(1, "a"))
    pool.release(1)
    assert pool.num_free == 2
    pool.acquire(1)
    assert pool.num_free == 1
    assert pool.ref_count(1) == 1
    pool.check_integrity({})


def test_a_second_block_with_a_known_digest_is_not_registered() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    assert pool.register(_block(1, "a"))
    assert not pool.register(_block(2, "a"))
    assert pool.lookup(b"a") == _block(1, "a")
    pool.release(2)
    assert pool.allocate(2) == [2, 3]


def test_a_forgotten_block_is_blank_again() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.register(_block(1, "a"))
    pool.release(1)
    pool.forget(1)
    assert pool.lookup(b"a") is None
    assert pool.num_registered == 0
    pool.check_integrity({})


def test_releasing_a_free_block_is_fatal() -> None:
    pool = BlockPool(3)
    with pytest.raises(EngineFatal, match="block 1 released with 0 references"):
        pool.release(1)


def test_sharing_a_free_unregistered_block_is_fatal() -> None:
    with pytest.raises(EngineFatal, match="nothing to share"):
        BlockPool(3).acquire(2)


def test_registering_a_free_block_is_fatal() -> None:
    with pytest.raises(EngineFatal, match="registered while free"):
        BlockPool(3).register(_block(1, "a"))


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_the_integrity_check_sees_a_lost_and_a_doubled_block() -> None:
    pool = BlockPool(4)
    pool._blank.pop()
    with pytest.raises(EngineFatal, match="a block is lost"):
        pool.check_integrity({})
    pool._blank.extend([1, 1])
    with pytest.raises(EngineFatal, match="free twice"):
        pool.check_integrity({})
