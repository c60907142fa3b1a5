"""A prefix group as a part of a `PrefixBatch`."""

from __future__ import annotations

from typing import NamedTuple

from kernels.cpu.block_run import BlockRun


class PrefixMember(NamedTuple):
    """A group's place in its batch."""

    vectors: slice  # of the batch's vectors: [Hkv, queries of the group * Hq / Hkv] of them
    blocks: BlockRun  # the prefix
