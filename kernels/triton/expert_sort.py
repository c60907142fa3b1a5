"""Which rows each expert works on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.expert_layout import ExpertLayout
from kernels.triton.moe_launch import (
    MAX_PAIRS_PER_EXPERT_SCAN,
    expert_count_launch,
    expert_scan_launch,
    power_of_two_from,
)


@triton.jit(do_not_specialize=["num_pairs"])
def _scan_expert_kernel(
    expert_ids_ptr,  # [P], int64
    pair_ids_ptr,  # [P], int64
    expert_offsets_ptr,  # [E + 1], int64
    num_pairs,
    BLOCK: tl.constexpr,
):
    """One expert: count the pairs of lower experts, then write its own after them, in their order.

    Grid: (E,)
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    num_lower = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + lanes
        ids = tl.load(expert_ids_ptr + pairs, mask=pairs < num_pairs, other=0x7FFFFFFF)
        num_lower += (ids < expert).to(tl.int32)
    place = tl.sum(num_lower, 0)
    if expert == 0:
        tl.store(expert_offsets_ptr, tl.zeros([], dtype=tl.int64))
    for start in range(0, num_pairs, BLOCK):
        pairs = start + lanes
        ids = tl.load(expert_ids_ptr + pairs, mask=pairs < num_pairs, other=0x7FFFFFFF)
        is_mine = (ids == expert).to(tl.int32)
        tl.store(pair_ids_ptr + place + tl.cumsum(is_mine, 0) - 1, pairs.to(tl.int64), mask=is_mine > 0)
        place += tl.sum(is_mine, 0)
    tl.store(expert_offsets_ptr + expert + 1, place.to(tl.int64))


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    expert_ids_ptr,  # [P], int64
    counts_ptr,  # [num_blocks, E], int32
    num_pairs,
    num_experts,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """How many pairs of one block go to each expert.

    Grid: (num_blocks,)
    """
    block = tl.program_id(0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(expert_ids_ptr + pairs, mask=pairs < num_pairs, other=0)
    counts = tl.histogram(ids.to(tl.int32), BLOCK_E, mask=pairs < num_pairs)
    experts = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + block * num_experts + experts, counts, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    expert_ids_ptr,  # [P], int64
    counts_ptr,  # [num_blocks, E], int32
    pair_ids_ptr,  # [P], int64
    expert_offsets_ptr,  # [E + 1], int64
    num_pairs,
    num_experts,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write one block's pairs: after lower experts, after their own expert's pairs of earlier blocks, in their order.

    Grid: (num_blocks,)
    """
    block = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    chunk = tl.arange(0, CHUNK)
    totals = tl.zeros([BLOCK_E], dtype=tl.int32)
    earlier = tl.zeros([BLOCK_E], dtype=tl.int32)
    for start in range(0, tl.num_programs(0), CHUNK):
        blocks = start + chunk
        is_count = (blocks[:, None] < tl.num_programs(0)) & (experts[None, :] < num_experts)
        counts = tl.load(counts_ptr + blocks[:, None] * num_experts + experts[None, :], mask=is_count, other=0)
        totals += tl.sum(counts, 0)
        earlier += tl.sum(tl.where(blocks[:, None] < block, counts, 0), 0)
    starts = tl.cumsum(totals, 0) - totals
    if block == 0:
        tl.store(expert_offsets_ptr + experts, starts.to(tl.int64), mask=experts < num_experts)
        tl.store(expert_offsets_ptr + num_experts, num_pairs.to(tl.int64))

    lanes = tl.arange(0, BLOCK)
    pairs = block * BLOCK + lanes
    ids = tl.load(expert_ids_ptr + pairs, mask=pairs < num_pairs, other=0).to(tl.int32)
    ranks = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, BLOCK, CHUNK):
        others = block * BLOCK + start + chunk
        other_ids = tl.load(expert_ids_ptr + others, mask=others < num_pairs, other=-1).to(tl.int32)
        is_before = (other_ids[None, :] == ids[:, None]) & ((start + chunk)[None, :] < lanes[:, None])
        ranks += tl.sum(is_before.to(tl.int32), 1)
    places = tl.gather(starts + earlier, ids, 0) + ranks
    tl.store(pair_ids_ptr + places, pairs.to(tl.int64), mask=pairs < num_pairs)


def sort_tokens_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertLayout:
    """See `Operations.sort_tokens_by_expert`.

    The ids are taken to lie in 0 .. num_experts - 1, as a router's do: the host could refuse others only by waiting for
    the GPU.
    """
    num_pairs, device = expert_ids.numel(), expert_ids.device
    ids = expert_ids.contiguous()
    pair_ids = torch.empty(num_pairs, dtype=torch.int64, device=device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int64, device=device)
    if num_pairs <= MAX_PAIRS_PER_EXPERT_SCAN:
        launch = expert_scan_launch(num_pairs)
        _scan_expert_kernel[(num_experts,)](
            ids, pair_ids, offsets, num_pairs, BLOCK=launch.columns, num_warps=launch.num_warps
        )
    else:
        launch = expert_count_launch()
        blocks = {"BLOCK": launch.columns, "BLOCK_E": power_of_two_from(num_experts), "num_warps": launch.num_warps}
        grid = (triton.cdiv(num_pairs, launch.columns),)
        counts = torch.empty(grid[0], num_experts, dtype=torch.int32, device=device)
        _count_kernel[grid](ids, counts, num_pairs, num_experts, **blocks)
        _place_kernel[grid](ids, counts, pair_ids, offsets, num_pairs, num_experts, CHUNK=launch.rows, **blocks)
    return ExpertLayout(pair_ids, offsets, expert_ids.shape[1])
