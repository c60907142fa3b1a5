"""Gives KV blocks to sequences, shares them between equal prefixes, and takes them back.

A chain of digests names the content of a sequence's full blocks; blocks with the same name are the same block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from engine.errors import EngineFatal, InvalidRequest, KVPoolExhausted
from engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, CachedBlock
from engine.stats import PrefixCacheMetrics

DIGEST_BYTES = 16  # 128 bits: at 2^32 blocks a collision has probability 2^-65, and a hit verifies tokens as well


class BlockManager:
    """Blocks of all sequences: probe -> pin the hits -> allocate the rest -> (run) -> commit -> free.

    A hit covers at most `(len - 1) // block_size` blocks, so the last token is always computed and a shared block is
    never written; `max_hit_tokens` lowers that bound. The manager knows which blocks are being computed
    (`pending_block`), so that identical prefixes that arrive together are computed once, and which ones waiting
    sequences will need (`want`): these are evicted last.

    Where every layer of the model has a window, blocks that fell out of it are given back while the sequence runs
    (`release_unseen`). Its table has the null block in their place; they may still be hit.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool, kept_tokens: int | None = None
    ) -> None:
        """kept_tokens: the last tokens of a sequence that the next one sees, itself included; None: all."""
        self.num_blocks = num_blocks  # in the pool, the null block included
        self.block_size = block_size
        self.capacity_tokens = (num_blocks - 1) * block_size  # of one sequence that had the pool for itself
        self.prefix_caching = prefix_caching
        self._kept_tokens = kept_tokens
        self._pool = BlockPool(num_blocks)
        self._sequences: dict[str, SequenceBlocks] = {}
        self._computing: dict[bytes, str] = {}  # digest of a block not committed yet -> the sequence computing it
        self._probes = self._hits = self._queried_tokens = self._hit_tokens = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks an allocation could take now."""
        return self._pool.num_free

    @property
    def num_sequences(self) -> int:
        """Sequences that have blocks."""
        return len(self._sequences)

    def new_chain(self, token_ids: Sequence[int], salt: str) -> BlockHashChain:
        """The digests of a prompt's full blocks; empty where prefix caching is off."""
        chain = BlockHashChain(self.block_size, salt)
        if self.prefix_caching:
            chain.extend(token_ids)
        return chain

    def branch_chain(self, chain: BlockHashChain, token_ids: Sequence[int]) -> BlockHashChain:
        """The same for a prompt that begins with the one of `chain`, whose blocks are not hashed again."""
        branch = chain.branch()
        if self.prefix_caching:
            branch.extend(token_ids)
        return branch

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def pending_block(
        self, chain: BlockHashChain, token_ids: Sequence[int], max_hit_tokens: int | None = None
    ) -> int | None:
        """Index of the first block that is missing for this sequence to share, if another one is computing it."""
        for index in range(self._max_hits(chain, token_ids, max_hit_tokens)):
            digest = chain.digests[index]
            if self._pool.lookup(digest) is None:
                return index if digest in self._computing else None
        return None

    def want(self, chain: BlockHashChain) -> None:
        """Note that a waiting sequence will need these blocks. Its chain must not change until `unwant`."""
        self._pool.want(chain.digests)

    def unwant(self, chain: BlockHashChain) -> None:
        """Note that the sequence waits no more."""
        self._pool.unwant(chain.digests)

    def blocks_needed(self, chain: BlockHashChain, token_ids: Sequence[int], max_hit_tokens: int | None = None) -> int:
        """Free blocks that `open` would take now: new ones, and shared ones that no sequence has at the moment."""
        hits = self._probe(chain, token_ids, max_hit_tokens)
        resurrected = sum(self._pool.ref_count(block.block_id) == 0 for block in hits)
        return self.blocks_for(len(token_ids)) - len(hits) + resurrected

    def open(
        self, sequence_id: str, chain: BlockHashChain, token_ids: Sequence[int], max_hit_tokens: int | None = None
    ) -> int:
        """Give a new sequence blocks for all of `token_ids`; returns how many of these tokens are in KV already.

        Raises KVPoolExhausted, having changed nothing, when the blocks it cannot share are more than are free.
        """
        if sequence_id in self._sequences:
            raise InvalidRequest(
                f"sequence {sequence_id!r} holds blocks already", param="request_id", value=sequence_id
            )
        hits = self._probe(chain, token_ids, max_hit_tokens)
        for block in hits:  # pinned first: what we are about to share must not be evicted for what we allocate
            self._pool.acquire(block.block_id)
        try:
            fresh = self._pool.allocate(self.blocks_for(len(token_ids)) - len(hits))
        except KVPoolExhausted:
            for block in reversed(hits):
                self._pool.release(block.block_id)
            raise
        table = array("i", (*(block.block_id for block in hits), *fresh))
        self._sequences[sequence_id] = SequenceBlocks(chain, len(hits), table)
        self.release_unseen(sequence_id, len(hits) * self.block_size)
        for digest in chain.digests[len(hits) :]:
            self._computing.setdefault(digest, sequence_id)
        self._probes += 1
        self._hits += bool(hits)
        self._queried_tokens += len(token_ids)
        self._hit_tokens += len(hits) * self.block_size
        return len(hits) * self.block_size

    def grow(self, sequence_id: str, num_tokens: int) -> None:
        """Make room for `num_tokens` in all. Raises KVPoolExhausted, having changed nothing, when too few are free."""
        table = self._sequence(sequence_id).block_table
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > 0:
            table.extend(self._pool.allocate(missing))

    def missing_blocks(self, sequence_id: str, num_tokens: int) -> int:
        """Blocks that `grow` would take."""
        return max(0, self.blocks_for(num_tokens) - len(self._sequence(sequence_id).block_table))

    def commit(self, sequence_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` of `token_ids` are in KV and good: offer their full blocks to later hits."""
        sequence = self._sequence(sequence_id)
        if not self.prefix_caching:
            return
        full = num_computed_tokens // self.block_size
        if full <= sequence.num_committed_blocks:
            return
        chain = sequence.chain
        chain.extend(token_ids)
        for index in range(sequence.num_committed_blocks, full):
            tokens = tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])
            digest = chain.digests[index]
            block = CachedBlock(sequence.block_table[index], digest, chain.parent_of(index), tokens)
            if not self._pool.register(block):
                self._share_twin(sequence.block_table, index, block)
            self._no_longer_computing(digest, sequence_id)
        sequence.num_committed_blocks = full

    def release_unseen(self, sequence_id: str, num_computed_tokens: int) -> None:
        """Give back the blocks that no token from `num_computed_tokens` on sees; tokens before are in KV and committed.

        Steps that were scheduled before may still read them: what takes a block writes to it in a later step.
        """
        if self._kept_tokens is None:
            return
        sequence = self._sequence(sequence_id)
        end = (num_computed_tokens + 1 - self._kept_tokens) // self.block_size
        while sequence.num_released_blocks < end:
            index = sequence.num_released_blocks
            self._pool.release(sequence.block_table[index])
            sequence.block_table[index] = NULL_BLOCK
            sequence.num_released_blocks += 1

    def block_table(self, sequence_id: str) -> array[int]:
        """The sequence's blocks in order: 4 bytes each, which a step's arrays take over without a look at each."""
        return self._sequence(sequence_id).block_table

    def free(self, sequence_id: str) -> None:
        """Give back a sequence's blocks, tail first. What was committed may still be hit. Unknown ids are a no-op."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        for digest in sequence.chain.digests[sequence.num_committed_blocks :]:
            self._no_longer_computing(digest, sequence_id)
        for block_id in reversed(sequence.held_blocks):
            self._pool.release(block_id)

    def discard(self, sequence_id: str) -> None:
        """Like `free`, for a sequence whose KV cannot be trusted: all its blocks are withdrawn from later hits.

        Those it shared as well: the fault may have come with them, and would come again with every hit.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        for block_id in sequence.held_blocks:
            self._pool.forget(block_id)
        self.free(sequence_id)

    def metrics(self, bytes_per_block: int) -> PrefixCacheMetrics:
        """Counters since the pool was made."""
        pool = self._pool
        return PrefixCacheMetrics(
            enabled=self.prefix_caching,
            probes=self._probes,
            hits=self._hits,
            queried_tokens=self._queried_tokens,
            saved_prefill_tokens=self._hit_tokens,
            evictions=pool.num_evictions,
            registered_blocks=pool.num_registered,
            used_blocks=self.num_blocks - 1 - pool.num_free,
            free_blocks=pool.num_free,
            block_size=self.block_size,
            registered_bytes=pool.num_registered * bytes_per_block,
        )

    def check_integrity(self, waiting: Iterable[BlockHashChain] = ()) -> None:
        """Raise EngineFatal unless references, tables, the in-flight index and what is wanted agree. O(num_blocks).

        `waiting`: the chains of the sequences that wait.
        """
        self._pool.check_integrity(Counter(digest for chain in waiting for digest in chain.digests))
        used = Counter(block_id for s in self._sequences.values() for block_id in s.held_blocks)
        for block_id in range(self.num_blocks):
            if self._pool.ref_count(block_id) != used[block_id]:
                raise EngineFatal(
                    f"block {block_id} has {self._pool.ref_count(block_id)} references, {used[block_id]} holders"
                )
        strays = set(self._computing.values()) - self._sequences.keys()
        if strays:
            raise EngineFatal(f"blocks wait for sequences that hold none: {sorted(strays)}")

    def _max_hits(self, chain: BlockHashChain, token_ids: Sequence[int], max_hit_tokens: int | None) -> int:
        limit = len(token_ids) - 1
        if max_hit_tokens is not None:
            limit = min(limit, max_hit_tokens)
        return min(len(chain.digests), limit // self.block_size)

    def _probe(self, chain: BlockHashChain, token_ids: Sequence[int], max_hit_tokens: int | None) -> list[CachedBlock]:
        """The longest run of leading blocks found, each verified by its tokens and its parent."""
        size = self.block_size
        hits: list[CachedBlock] = []
        for index in range(self._max_hits(chain, token_ids, max_hit_tokens)):
            block = self._pool.lookup(chain.digests[index])
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            if block is None or block.token_ids != tokens or block.parent != chain.parent_of(index):
                break
            hits.append(block)
        return hits

    def _share_twin(self, table: array[int], index: int, block: CachedBlock) -> None:
        """Where another sequence has computed the same block, use that one: parents and children stay together."""
        twin = self._pool.lookup(block.digest)
        if twin is None or twin.token_ids != block.token_ids or twin.parent != block.parent:
            return  # a collision of digests: keep our own, unregistered
        self._pool.acquire(twin.block_id)
        self._pool.release(block.block_id)
        table[index] = twin.block_id

    def _sequence(self, sequence_id: str) -> SequenceBlocks:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise EngineFatal(f"sequence {sequence_id!r} holds no blocks") from None

    def _no_longer_computing(self, digest: bytes, sequence_id: str) -> None:
        if self._computing.get(digest) == sequence_id:
            del self._computing[digest]


class BlockHashChain:
    """Digest i names tokens `0 .. (i + 1) * block_size` under a salt: h_i = blake2b(h_(i-1), tokens of block i).

    Only full blocks have one. A sequence keeps its chain, so that a prompt is hashed once, however often it is probed.
    """

    def __init__(self, block_size: int, salt: str) -> None:
        self.block_size = block_size
        self.root = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
        self.digests: list[bytes] = []

    def branch(self) -> BlockHashChain:
        """A chain of its own that begins as this one does."""
        chain = copy(self)
        chain.digests = self.digests.copy()
        return chain

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the blocks that `token_ids`, the whole sequence so far, has completed since the last call."""
        size = self.block_size
        parent = self.digests[-1] if self.digests else self.root
        for start in range(len(self.digests) * size, len(token_ids) - size + 1, size):
            block = array("i", token_ids[start : start + size])
            parent = hashlib.blake2b(parent + block.tobytes(), digest_size=DIGEST_BYTES).digest()
            self.digests.append(parent)

    def parent_of(self, index: int) -> bytes:
        """Digest of the block before block `index`; the salted root for the first."""
        return self.digests[index - 1] if index else self.root


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of one sequence. Written by BlockManager alone."""

    chain: BlockHashChain
    num_committed_blocks: int  # leading blocks known to hold good KV; registered where their digest was new
    block_table: array[int]  # the null block in place of those that were released
    num_released_blocks: int = 0  # the first ones, which no later token sees

    @property
    def held_blocks(self) -> array[int]:
        """Those of its table that it has."""
        return self.block_table[self.num_released_blocks :]
