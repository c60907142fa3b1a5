"""Launch parameters of the kernels that read logits [N, V]. None depends on the GPU's architecture.

Not measured on a GPU yet: each number is argued from the bytes in flight and the registers of the compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from kernels.triton.target import DEFAULT_MULTIPROCESSORS

WIDE_BLOCK = 8192  # tokens; vLLM's block of Gumbel-max, see argmax_launch
NARROW_BLOCK = 2048


@dataclass(frozen=True)
class VocabLaunch:
    """How one kernel covers tokens (or, for penalties, pairs)."""

    block: int  # tokens a program reads at once, a power of two
    num_warps: int
    num_stages: int = 1  # of a loop: all but one are blocks on their way, `4 * block` bytes of shared memory each


def argmax_launch(num_rows: int, vocab_size: int) -> VocabLaunch:
    """Wide blocks, 32 tokens (8 loads of 16 bytes) a thread, unless they were too few to give each processor one."""
    if num_rows * triton.cdiv(vocab_size, WIDE_BLOCK) >= DEFAULT_MULTIPROCESSORS:
        return VocabLaunch(WIDE_BLOCK, num_warps=8)
    return VocabLaunch(NARROW_BLOCK, num_warps=4)


def gumbel_launch() -> VocabLaunch:
    """16 tokens a thread: about 100 instructions a token bind it, not memory; the row's keys cost 60 a program."""
    return VocabLaunch(NARROW_BLOCK, num_warps=4)


def best_of_blocks_launch(num_blocks: int) -> VocabLaunch:
    """The second stage: one load for the 19 to 75 blocks of a row."""
    return VocabLaunch(triton.next_power_of_2(num_blocks), num_warps=1)


def penalties_launch() -> VocabLaunch:
    """Two pairs a thread, whose 4 bytes of logits lie anywhere."""
    return VocabLaunch(block=256, num_warps=4)


def collect_launch(vocab_size: int) -> VocabLaunch:
    """One program a row, so 64 rows use half of the GPU: 512 threads and two blocks on their way, 64 KiB, feed each.

    The block is also the number of groups whose maxima bound the k-th largest logit, and the room for candidates.
    """
    return VocabLaunch(min(WIDE_BLOCK, max(triton.next_power_of_2(vocab_size), 128)), num_warps=16, num_stages=3)


def search_launch(vocab_size: int) -> VocabLaunch:
    """The candidates of most rows (little more than top_k, or 2048) are one block, and three more are on their way.

    8 tokens a thread, each with three sums of int64, take nearly all of the 128 registers that 16 warps leave.
    """
    return VocabLaunch(min(4096, max(triton.next_power_of_2(vocab_size), 128)), num_warps=16, num_stages=4)


def mask_launch() -> VocabLaunch:
    """16 tokens a thread; a row of 151,936 tokens takes 75 programs."""
    return VocabLaunch(NARROW_BLOCK, num_warps=4)
