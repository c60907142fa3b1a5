"""Sequences that may take only a part of what the prefix cache has."""

from __future__ import annotations

from engine.kv_cache.block_manager import BlockManager


def test_a_sequence_that_must_compute_more_shares_less_waits_for_less_and_is_found_by_others() -> None:
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
