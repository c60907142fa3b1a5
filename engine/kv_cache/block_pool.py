"""Tracks which KV blocks are in use, which are free, and which free ones still hold a prefix worth keeping."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.errors import EngineFatal, KVPoolExhausted

NULL_BLOCK = 0


class BlockPool:
    """Counts the references to each block, and orders the free ones. Every operation is O(1) a block.

    Block 0 is the null block: padding points at it, and it is never handed out. A freed block that is registered keeps
    its content, and a hit brings it back. It is taken for something else only when no blank block is left: first those
    that no waiting sequence will need, then those that one will, each oldest first. Of blank blocks the one that was
    freed last is taken first: its memory is there already, and nothing is gained by waiting, since a blank block has
    nothing to keep. So a pool takes as much memory as was in use at once, not as much as it could hold.

    A child is evicted before its parent, without which no hit can reach it. Blocks of a sequence are freed tail first,
    and a sequence that has a registered child has its parent, so the parent is freed no earlier. A sequence that wants
    a child wants its parent, too; and wanting a chain makes its free blocks the newest ones, tail first, so that a
    child that is wanted late does not stand behind its parent.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; accepted: at least 2, the null block included")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        # Free, nothing worth keeping: those that were in use, the last one first, then those that never were.
        self._blank: deque[int] = deque(range(1, num_blocks))
        # Free and registered, oldest first: those that no waiting sequence will need, and those that one will.
        self._unwanted: OrderedDict[int, None] = OrderedDict()
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._num_wanting: dict[bytes, int] = {}  # digest -> waiting sequences that will need it, 1 or more
        self._registered: dict[int, CachedBlock] = {}  # block id -> content, in use or free
        self._by_digest: dict[bytes, CachedBlock] = {}

    @property
    def num_free(self) -> int:
        """Blocks an allocation can take, registered ones included."""
        return len(self._blank) + len(self._unwanted) + len(self._wanted)

    @property
    def num_registered(self) -> int:
        """Blocks that a hit could find."""
        return len(self._registered)

    def ref_count(self, block_id: int) -> int:
        """How many sequences have the block."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. Raises KVPoolExhausted and takes none when too few are free."""
        if count > self.num_free:
            raise KVPoolExhausted(need=count, free=self.num_free)
        return [self._take_one() for _ in range(count)]

    def acquire(self, block_id: int) -> None:
        """Add a reference to a registered block, back from the free ones if need be."""
        if self._ref_counts[block_id] == 0:
            block = self._registered.get(block_id)
            if block is None:
                raise EngineFatal(f"block {block_id} is free and not registered: nothing to share")
            del self._list_of(block.digest)[block_id]
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop a reference. At the last one the block is free, and keeps its content if registered."""
        count = self._ref_counts[block_id]
        if count < 1 or block_id == NULL_BLOCK:
            raise EngineFatal(f"block {block_id} released with {count} references")
        self._ref_counts[block_id] = count - 1
        if count == 1:
            block = self._registered.get(block_id)
            if block is None:
                self._blank.appendleft(block_id)
            else:
                self._list_of(block.digest)[block_id] = None

    def lookup(self, digest: bytes) -> CachedBlock | None:
        """The registered block of this digest."""
        return self._by_digest.get(digest)

    def register(self, block: CachedBlock) -> bool:
        """Offer a full block that is in use to later hits. False, and no change, where its digest is known already."""
        if self._ref_counts[block.block_id] < 1:
            raise EngineFatal(f"block {block.block_id} registered while free")
        if block.digest in self._by_digest:
            return False
        self._registered[block.block_id] = block
        self._by_digest[block.digest] = block
        return True

    def forget(self, block_id: int) -> None:
        """Withdraw a registered block from later hits. No-op for others."""
        block = self._registered.pop(block_id, None)
        if block is None:
            return
        del self._by_digest[block.digest]
        if self._ref_counts[block_id] == 0:
            del self._list_of(block.digest)[block_id]
            self._blank.appendleft(block_id)

    def want(self, digests: Sequence[bytes]) -> None:
        """A waiting sequence will need these blocks, root first. O(len(digests))."""
        for digest in reversed(digests):
            block_id = self._free_block(digest)
            if block_id is not None:
                del self._list_of(digest)[block_id]
                self._wanted[block_id] = None
            self._num_wanting[digest] = self._num_wanting.get(digest, 0) + 1

    def unwant(self, digests: Sequence[bytes]) -> None:
        """A sequence that wanted these blocks waits no more."""
        for digest in reversed(digests):
            count = self._num_wanting[digest]
            if count > 1:
                self._num_wanting[digest] = count - 1
                continue
            del self._num_wanting[digest]
            block_id = self._free_block(digest)
            if block_id is not None:
                del self._wanted[block_id]
                self._unwanted[block_id] = None

    def _free_block(self, digest: bytes) -> int | None:
        block = self._by_digest.get(digest)
        return None if block is None or self._ref_counts[block.block_id] else block.block_id

    def _list_of(self, digest: bytes) -> OrderedDict[int, None]:
        return self._wanted if digest in self._num_wanting else self._unwanted

    def _take_one(self) -> int:
        if self._blank:
            block_id = self._blank.popleft()
        else:
            block_id, _ = (self._unwanted or self._wanted).popitem(last=False)
            del self._by_digest[self._registered.pop(block_id).digest]
            self.num_evictions += 1
        self._ref_counts[block_id] = 1
        return block_id

    def check_integrity(self, num_wanting: Mapping[bytes, int]) -> None:
        """Raise EngineFatal unless every block is in exactly one place, both indexes agree, and `num_wanting` is how
        many waiting sequences will need each digest. O(num_blocks).
        """
        blank, unwanted, wanted = set(self._blank), set(self._unwanted), set(self._wanted)
        free = blank | unwanted | wanted
        used = {block_id for block_id, count in enumerate(self._ref_counts) if count > 0}
        registered = {block_id: block.digest for block_id, block in self._registered.items()}
        problems = {
            "a block is free twice": len(blank) != len(self._blank),
            "the null block was handed out": NULL_BLOCK in free | used,
            "a block is both free and held": bool(free & used) or len(free) != len(blank) + len(unwanted) + len(wanted),
            "a block is lost": len(free) + len(used) != self.num_blocks - 1,
            "a blank block is registered": bool(blank & registered.keys()),
            "an evictable block is not registered": bool((unwanted | wanted) - registered.keys()),
            "the two indexes differ": {b.digest: b for b in self._registered.values()} != self._by_digest,
            "what is wanted is miscounted": self._num_wanting != num_wanting,
            "a wanted block is among the others": any(registered.get(b) in self._num_wanting for b in unwanted),
            "a block nobody wants is spared": any(registered.get(b) not in self._num_wanting for b in wanted),
        }
        broken = [name for name, is_broken in problems.items() if is_broken]
        if broken:
            raise EngineFatal(f"KV block pool: {'; '.join(broken)}")


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """The identity of a full, immutable block. Tokens and parent are kept to verify a hit."""

    block_id: int
    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]  # exactly block_size of them
