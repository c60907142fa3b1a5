"""The chain of digests that names the content of a sequence's full blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16  # 128 bits: at 2^32 blocks a collision has probability 2^-65, and a hit verifies tokens as well


class BlockHashChain:
    """Digest i names tokens `0 .. (i + 1) * block_size` under a salt: h_i = blake2b(h_(i-1), tokens of block i).

    Only full blocks have one. Kept beside a sequence so that a prompt is hashed once however often it is probed.
    """

    def __init__(self, block_size: int, salt: str) -> None:
        self.block_size = block_size
        self.root = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
        self.digests: list[bytes] = []

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
