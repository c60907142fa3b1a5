"""Which blocks are free, which are held, and which free ones still hold something worth keeping."""

from __future__ import annotations

from collections import OrderedDict, deque

from engine.errors import EngineFatal, KVPoolExhausted
from engine.kv_cache.cached_block import CachedBlock

NULL_BLOCK = 0


class BlockPool:
    """Reference counts and the order in which free blocks are taken. Every operation is O(1) a block.

    Block 0 is the null block: padding points at it, it is never handed out. A freed block that is registered keeps
    its content and may be resurrected by a hit; it is taken for something else only when no blank block is left,
    oldest first. Whoever frees a sequence gives its blocks tail first, so a child is evicted before its parent:
    whoever holds a registered child holds the registered parent, hence the parent is freed no earlier.

    A list of free ids with the content beside it, as the seed had, cannot say which free block is worth keeping and
    recycles the most recently freed (seeds 2.1); a scan for it is O(n).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; accepted: at least 2, the null block included")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._blank: deque[int] = deque(range(1, num_blocks))  # free, nothing worth keeping
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free, registered; oldest first
        self._registered: dict[int, CachedBlock] = {}  # block id -> content, held or free
        self._by_digest: dict[bytes, CachedBlock] = {}

    @property
    def num_free(self) -> int:
        """Blocks an allocation can take, registered ones included."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_registered(self) -> int:
        """Blocks that a hit could find."""
        return len(self._registered)

    def ref_count(self, block_id: int) -> int:
        """How many sequences hold the block."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. Raises KVPoolExhausted and takes none when too few are free."""
        if count > self.num_free:
            raise KVPoolExhausted(need=count, free=self.num_free)
        return [self._take_one() for _ in range(count)]

    def acquire(self, block_id: int) -> None:
        """Add a reference to a registered block, back from the free ones if need be."""
        if self._ref_counts[block_id] == 0:
            if block_id not in self._evictable:
                raise EngineFatal(f"block {block_id} is free and not registered: nothing to share")
            del self._evictable[block_id]
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop a reference. At the last one the block is free, and keeps its content if registered."""
        count = self._ref_counts[block_id]
        if count < 1 or block_id == NULL_BLOCK:
            raise EngineFatal(f"block {block_id} released with {count} references")
        self._ref_counts[block_id] = count - 1
        if count == 1:
            if block_id in self._registered:
                self._evictable[block_id] = None
            else:
                self._blank.append(block_id)

    def lookup(self, digest: bytes) -> CachedBlock | None:
        """The registered block of this digest."""
        return self._by_digest.get(digest)

    def register(self, block: CachedBlock) -> bool:
        """Offer a held, full block to later hits. False, and no change, where its digest is known already."""
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
            del self._evictable[block_id]
            self._blank.append(block_id)

    def _take_one(self) -> int:
        if self._blank:
            block_id = self._blank.popleft()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            del self._by_digest[self._registered.pop(block_id).digest]
            self.num_evictions += 1
        self._ref_counts[block_id] = 1
        return block_id

    def check_integrity(self) -> None:
        """Raise EngineFatal unless every block is in exactly one place and both indexes agree. O(num_blocks)."""
        blank, evictable = set(self._blank), set(self._evictable)
        held = {block_id for block_id, count in enumerate(self._ref_counts) if count > 0}
        problems = {
            "a block is free twice": len(blank) != len(self._blank),
            "the null block was handed out": NULL_BLOCK in blank | evictable | held,
            "a block is both free and held": bool((blank | evictable) & held) or bool(blank & evictable),
            "a block is lost": len(blank) + len(evictable) + len(held) != self.num_blocks - 1,
            "a blank block is registered": bool(blank & self._registered.keys()),
            "an evictable block is not registered": bool(evictable - self._registered.keys()),
            "the two indexes differ": {b.digest: b for b in self._registered.values()} != self._by_digest,
        }
        broken = [name for name, is_broken in problems.items() if is_broken]
        if broken:
            raise EngineFatal(f"KV block pool: {'; '.join(broken)}")
