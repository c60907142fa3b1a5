"""Launch parameters of the attention kernels: plain functions of shapes and compute capability.

The numbers come from published Triton kernels and from compiling each candidate for sm_80 and sm_90
(tests/kernels/aot/test_attention.py fails if a chosen one spills); DESIGN.md has what an H200 found. GPUs of other
generations take sm_80's, which fit in the 99 KiB of shared memory of sm_86, sm_89 and sm_120.

How `engine.deterministic`, which is refused on a GPU today, could hold there: a token must get the same bits as a
decode row and in any chunk, so nothing may be split by lengths or by the number of rows, and all rows go through
`paged_prefill_attention`. It adds a query's keys in rising order, in tiles at absolute positions, and `prefill_launch`
looks at nothing that changes from step to step. A masked key adds an exact 0 and leaves the maximum alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.triton.launch import power_of_two_from, tuned

_MAX_PROJECTED_HEAD_BYTES = 256
_MIN_DOT_SIZE = 16  # tl.dot takes no smaller dimension
# Eight blocks of 16: a program with fewer mostly starts up. With 8 query heads a KV head and 128 dims, the result of
# such a split (4 KiB in float32, written and read again) is an eighth of the keys and values it read.
_MIN_SPLIT_TOKENS = 128
# One program reads some 15 GB/s at most (16 KiB in flight, 1 us of latency): 8192 tokens of 128 dims take 0.3 ms. A
# longer row is split even where there are enough rows, so that it does not run on when the others are done.
_MAX_SPLIT_TOKENS = 8192
_PROGRAMS = 4  # of a multiprocessor, that a launch is split for
_MAX_FULL_SPLITS = 8  # of a launch that has half of those unsplit; those past a row's end start and return
SPLIT_MULTIPLE = 64  # of every tile of the rules: only the last tile of a row is partly filled
MERGE_NUM_WARPS = 4
_MERGED_ELEMENTS_OF_A_WARP = 1024  # 32 numbers a thread; with 64 triton 3.6.0 spills 8 bytes at 8 heads a KV head
_MERGE_ELEMENTS = 2048  # of a program: two loads of 16 bytes a thread from each input


@dataclass(frozen=True)
class DecodeSplits:
    """How a decode step cuts its rows. Each row for itself: a captured launch knows only a bound of the lengths."""

    num_splits: int  # programs along a row's keys; those past the last split of a row return at once
    # A row of n keys has splits of cdiv(n, num_splits) keys, rounded up to SPLIT_MULTIPLE, but not fewer than these.
    min_split_tokens: int  # a multiple of SPLIT_MULTIPLE


@dataclass(frozen=True)
class AttentionLaunch:
    """Shape of an attention program."""

    block_m: int  # (query, head of the group) pairs of a program: the M of its matrix products
    tile: int  # keys of one step of its loop
    num_warps: int
    num_stages: int  # half of them, rounded up, are tiles in memory: the block table is read ahead of the keys
    # Of a thread, at most. None: ptxas chooses, and may spill 8 bytes to fit one more program on a multiprocessor.
    max_registers: int | None = None

    def options(self, q_shape: Sequence[int], cache_shape: Sequence[int]) -> dict[str, int]:
        """What a kernel is compiled for. q [.., Hq, D], cache [num_blocks, block_size, Hkv, D]."""
        _, block_size, num_kv_heads, head_dim = cache_shape
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return limit | {
            "GROUP_SIZE": q_shape[1] // num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded_head_dim(head_dim),
            "BLOCK_SIZE": block_size,
            "BLOCK_M": self.block_m,
            "TILE": self.tile,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    def merge_options(self, group_size: int, head_dim: int) -> dict[str, int]:
        """What merging the parts of a row is compiled for: 32 numbers a thread at a time, or the heads of one part."""
        heads = power_of_two_from(min(group_size, self.block_m))
        elements = self.num_warps * _MERGED_ELEMENTS_OF_A_WARP
        return {"MERGED_HEADS": heads, "PARTS_AT_ONCE": max(elements // (heads * padded_head_dim(head_dim)), 1)}


def padded_head_dim(head_dim: int) -> int:
    """head_dim rounded up to a power of two that a matrix product takes."""
    return max(1 << (head_dim - 1).bit_length(), _MIN_DOT_SIZE)


def decode_launch(
    head_dim: int, element_bytes: int, capability: int, *, is_capped: bool = False, is_float8: bool = False
) -> AttentionLaunch:
    """Launch of the decode kernel, for head_dim up to 256; capability: compute capability such as 90; is_float8: the
    cache is, beside queries of element_bytes.

    16 packed heads, the smallest M, since decode waits for memory and not for products. The keys and values of two
    tiles are in flight while a third is added, so that memory is busy with one while the other is waited for. The
    block table, read ahead of the keys, takes two of the stages. At 128 dims one warp has a block of 16 keys: no
    warp waits for another, and addresses are one number apart. Nine such programs share a multiprocessor of Hopper
    (20 KiB, 224 registers a thread); an H200 reads 4.1 TB/s with them, 3.5 with four warps and 32 keys (DESIGN.md),
    and with those float8 was slower than bfloat16 (0.76), nine barriers a tile of 32 keys; with one warp no GPU has
    timed it. Nor has one the others, each of which has what spills nothing under triton 3.6.0 and 3.7.1: at 64 dims
    one warp spills up to 16 bytes, with padded heads (80 and 96 to 128 dims) any of one or two warps 8. Capped
    scores and float8 above 128 dims have one tile in flight, since two spill 8 bytes on sm_90.
    """
    if element_bytes == 4:  # exact products without tensor cores: larger ones spill
        return AttentionLaunch(block_m=16, tile=16, num_warps=8, num_stages=1, max_registers=255)
    block_d, is_special = padded_head_dim(head_dim), is_capped or is_float8
    limit: int | None = 168
    if head_dim < block_d:
        launch = (16, 4, 5) if is_float8 else (64, 4, 3)
    elif block_d > 128 or is_capped or (is_float8 and block_d < 128):
        launch = (32, 4, 4 if is_special and block_d > 128 else 5)
        limit = 224 if is_capped else {64: 128, 256: 224}.get(block_d) if is_float8 else None
    else:
        launch, limit = ((16, 1, 5), 224) if block_d == 128 else ((32, 2, 5), limit)
    measured = None if is_special else (tuned("decode_attention") or {}).get(str(head_dim))
    return AttentionLaunch(16, **measured) if measured else AttentionLaunch(16, *launch, limit)


def decodes_projected(head_dim: int, element_bytes: int, capability: int) -> bool:
    """Whether the decode kernel takes heads as projected; not where it would spill: they then have their own launch.

    Larger heads spill on sm_80: the query, its partner and the new key; so do padded ones, under triton 3.6.0 with two
    tiles in flight and under 3.7.1 with one.
    """
    is_padded = head_dim < padded_head_dim(head_dim)
    return head_dim * element_bytes <= _MAX_PROJECTED_HEAD_BYTES and (capability == 90 or not is_padded)


def decode_splits(num_programs: int, max_kv_len: int, num_multiprocessors: int) -> DecodeSplits:
    """How many splits a decode step has: where unsplit rows give each multiprocessor two programs, one for 8192 keys,
    else enough for four (the rule of TensorRT-LLM's Triton backend; on an H200 more gain nothing). A GPU's tuned rule
    has other numbers, and may split rows of full launches too.

    num_programs: programs of an unsplit launch; max_kv_len: tokens of the longest row, or a bound.
    """
    least, least_full, wanted = tuned("decode_splits") or (_MIN_SPLIT_TOKENS, _MAX_SPLIT_TOKENS, _PROGRAMS)
    num_programs_wanted = wanted * num_multiprocessors
    if 2 * num_programs >= num_programs_wanted:
        num_splits = min(-(-max_kv_len // least_full), _MAX_FULL_SPLITS)
        return DecodeSplits(max(num_splits, -(-max_kv_len // _MAX_SPLIT_TOKENS), 1), least_full)
    num_splits = -(-num_programs_wanted // num_programs)
    split_tokens = min(max(-(-max_kv_len // num_splits), least), _MAX_SPLIT_TOKENS)
    split_tokens = -(-split_tokens // SPLIT_MULTIPLE) * SPLIT_MULTIPLE
    return DecodeSplits(max(-(-max_kv_len // split_tokens), 1), least)


def prefill_launch(head_dim: int, element_bytes: int, capability: int, *, is_special: bool = False) -> AttentionLaunch:
    """Launch of the prefill kernel, for head_dim up to 256.

    capability: compute capability such as 90; is_special: the cache is float8, scores are capped or there is a window,
    which what was tuned for a GPU leaves to the rules.
    A tile is copied while the one before is multiplied. With three stages, since the block table is read ahead, a copy
    began and was waited for between two products: an H200 reached 29 to 36 % of a product's rate, some 3,500 cycles a
    tile of 128 rows and 64 keys whose products take 980.
    At 128 dims sm_90 takes up to 247 registers of 255 and 130 KiB; wgmma needs 64 rows to 4 warps, and 128 rows at 4
    warps spill 256 bytes, 128 keys a tile 56. sm_80 takes 207 and 65 KiB; 64 keys a tile spill 104 bytes at 128 rows
    and 8 warps, 88 at 64 rows and 4 warps.
    """
    is_wide, is_hopper = padded_head_dim(head_dim) > 128, capability == 90
    if element_bytes == 4:  # exact products without tensor cores: 32 rows spill 16 bytes under triton 3.6.0
        return AttentionLaunch(block_m=16, tile=16, num_warps=8, num_stages=1, max_registers=255)
    measured = None if is_special else (tuned("prefill_attention") or {}).get(str(head_dim))
    if measured:
        return AttentionLaunch(**measured)
    if is_wide:  # the sums alone take 128 registers a thread at 128 rows, where triton 3.6.0 spills 48 bytes on sm_90
        return AttentionLaunch(block_m=64, tile=32, num_warps=8, num_stages=5 if is_hopper else 2)
    if padded_head_dim(head_dim) <= 64:  # on sm_80 two programs share a multiprocessor; five stages spill 8 bytes there
        return AttentionLaunch(block_m=128, tile=64, num_warps=8, num_stages=5 if is_hopper else 3)
    return AttentionLaunch(block_m=128, tile=64 if is_hopper else 32, num_warps=8, num_stages=5)


def shared_prefix_launch(num_pairs: int, head_dim: int, element_bytes: int, capability: int) -> AttentionLaunch:
    """Launch of the kernel over shared keys, for head_dim up to 256.

    num_pairs: (query, head of the group) pairs of the largest group; capability: as of `prefill_launch`.
    As few rows as hold them all, so that each key is read once, but 128 at most: 16 as decode, 128 as prefill by
    the rules, and 64 at 4 warps, two programs a multiprocessor (at 128 dims up to 254 registers and 81 KiB on
    sm_90, 198 and 37 KiB on sm_80). At 256 dims 128 rows spill 128 bytes on sm_90.
    """
    launch = prefill_launch(head_dim, element_bytes, capability, is_special=True)
    if element_bytes == 4:
        return launch
    if num_pairs <= 16:
        is_padded = head_dim < padded_head_dim(head_dim)
        return AttentionLaunch(block_m=16, tile=32, num_warps=4, num_stages=4 if is_padded and capability != 90 else 5)
    if padded_head_dim(head_dim) > 128:
        return AttentionLaunch(block_m=64, tile=launch.tile, num_warps=8, num_stages=launch.num_stages)
    if num_pairs <= 64:  # one program is busy while the other waits
        return AttentionLaunch(block_m=64, tile=launch.tile, num_warps=4, num_stages=3)
    return launch


def shared_prefix_split_tokens(block_m: int, num_programs: int, max_tokens: int, num_multiprocessors: int) -> int:
    """Keys of one part of a shared prefix; a multiple of every tile.

    num_programs: programs of an unsplit launch; max_tokens: of the longest prefix. Split as by `decode_splits`, for as
    many programs as are meant to share a multiprocessor: 4 of 16 rows, 2 of 64, 1 of 128. The float32 result of a part,
    written and read again, is at most half the keys and values it read.
    """
    num_wanted = num_multiprocessors * min(max(128 // block_m, 1), 4)
    num_splits = 1 if 2 * num_programs >= num_wanted else -(-num_wanted // num_programs)
    split_tokens = min(max(-(-max_tokens // num_splits), _MIN_SPLIT_TOKENS, 4 * block_m), _MAX_SPLIT_TOKENS)
    return -(-split_tokens // SPLIT_MULTIPLE) * SPLIT_MULTIPLE


def saves_blocks(num_pairs: Sequence[int], block_m: int) -> bool:
    """Whether rows of so many (query, head of the group) pairs fill fewer blocks together than apart.

    Chunks of hundreds of tokens do not, and reading shared keys for all of them at once saves nothing.
    """
    return -(-sum(num_pairs) // block_m) < sum(-(-count // block_m) for count in num_pairs)


def merge_block_rows(head_dim: int) -> int:
    """(query, head) pairs that one program of the merge kernel takes."""
    return max(_MERGE_ELEMENTS // padded_head_dim(head_dim), 1)
