"""Launch parameters of the expert operations that are no matrix product of many rows. None is measured yet."""

from __future__ import annotations

from dataclasses import dataclass

# Up to here one program an expert reads all ids (at most 32 KB, from L2) and one launch sorts them; beyond, each
# program reads a block and a second launch places it. Notes on kernels of this kind put the border at some 4k ids.
MAX_PAIRS_PER_EXPERT_SCAN = 4096
# Weights of one step of the short cut: eight copies of 16 bytes for each of 128 threads, 16 KB of bfloat16, and two
# steps are in flight. An H200 needs 4.3 TB/s x 0.7 us = 3 MB in flight, 23 KB on each of its 132 multiprocessors.
ELEMENTS_OF_A_STEP = 8192


@dataclass(frozen=True)
class BlockLaunch:
    """The tile of one program."""

    rows: int  # power of two
    columns: int  # power of two
    num_warps: int


def power_of_two_from(value: int) -> int:
    """The smallest power of two that is at least `value` and at least 1."""
    return 1 << max(value - 1, 0).bit_length()


def expert_scan_launch(num_pairs: int) -> BlockLaunch:
    """One program an expert: columns = ids read at once."""
    return BlockLaunch(1, min(max(power_of_two_from(num_pairs), 128), 1024), 4)


def expert_count_launch() -> BlockLaunch:
    """One program a block of ids. columns = ids of a block, each compared with `rows` of them at a time.

    256 x 32 comparisons are 32 a thread of 8 warps (with 4 they take 228 registers). The counts of 65,536 pairs (8192
    tokens, 8 choices) over 128 experts are then 128 KB, which every program sums.
    """
    return BlockLaunch(32, 256, 8)


def gate_up_launch(hidden_size: int, itemsize: int) -> BlockLaunch:
    """The short cut's first half: rows = gates of a program (as many ups come along), columns = depth of a step.

    One token of Qwen3-30B-A3B (8 pairs, 768 gates, depth 2048) makes 768 programs, six a multiprocessor.
    """
    columns = min(power_of_two_from(hidden_size), 1024 // itemsize)
    return BlockLaunch(ELEMENTS_OF_A_STEP // 2 // 512, columns, 4)


def down_launch(intermediate_size: int, top_k: int, itemsize: int) -> BlockLaunch:
    """The short cut's second half: rows = outputs of a program, columns = depth of a step, for all choices at once.

    One token of Qwen3-30B-A3B makes 512 programs. A depth of 256 divides its 768.
    """
    choices = power_of_two_from(top_k)
    columns = min(power_of_two_from(intermediate_size), 512 // itemsize, max(ELEMENTS_OF_A_STEP // choices, 1))
    return BlockLaunch(max(ELEMENTS_OF_A_STEP // 256 // choices, 1), columns, 4)


def combine_launch(num_tokens: int, hidden_size: int) -> BlockLaunch:
    """columns = elements of a token that a program sums: 16 bytes of bfloat16 a thread and choice.

    A few tokens are cut finer, so that 64 tokens of width 2048 make 512 programs and not 128.
    """
    num_warps = 1 if num_tokens <= 256 else 4
    return BlockLaunch(1, min(power_of_two_from(hidden_size), 256 * num_warps), num_warps)
