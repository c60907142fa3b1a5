"""Mixture of experts around the matrix products: routes tokens, sorts them by expert and sums up their results.

None of the launch parameters is measured yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.operands import ExpertLayout, RoutedExperts
from kernels.triton.launch import TileLaunch, power_of_two_from

INVERT_BLOCK = 256

# Up to here one program an expert reads all ids (at most 32 KB, from L2) and one launch sorts them. With more, each
# program reads a block and a second launch places it. Others' kernels of this kind change over at some 4k ids too.
MAX_PAIRS_PER_EXPERT_SCAN = 4096


@triton.jit
def _route_topk_kernel(
    logits_ptr,  # [T, E], model dtype
    weights_ptr,  # [T, TOP_K], float32
    expert_ids_ptr,  # [T, TOP_K], int64
    num_experts,
    stride_logits_token,
    stride_logits_expert,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
):
    """Softmax over the experts of one token, then TOP_K times the largest that is left.

    Grid: (T,)
    """
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < num_experts
    logits = tl.load(
        logits_ptr + token * stride_logits_token + experts * stride_logits_expert, mask=is_expert, other=-float("inf")
    ).to(tl.float32)
    exponentials = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(exponentials, 0)
    is_sound = total >= 1.0  # the largest adds exp(0); a NaN or an infinity makes the total NaN, which is not >= 1

    # The bits of floats >= 0 order as integers do. One integer holds the probability and, below it, the expert's rank,
    # so its maximum is the likeliest expert, of equals the lower id.
    bits = (exponentials / total).to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.where(is_expert, (bits << 32) | (BLOCK_E - 1 - experts), -1)
    choices = tl.arange(0, BLOCK_CHOICES)
    weights = tl.zeros([BLOCK_CHOICES], dtype=tl.float32)
    expert_ids = tl.zeros([BLOCK_CHOICES], dtype=tl.int64)
    for choice in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, -1, keys)
        weights = tl.where(choices == choice, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), weights)
        expert_ids = tl.where(choices == choice, BLOCK_E - 1 - (best & 0xFFFFFFFF), expert_ids)
    if RENORMALISE:
        weights /= tl.sum(weights, 0)
    weights = tl.where(is_sound, weights, float("nan"))
    expert_ids = tl.where(is_sound, expert_ids, choices)
    is_choice = choices < TOP_K
    tl.store(weights_ptr + token * TOP_K + choices, weights, mask=is_choice)
    tl.store(expert_ids_ptr + token * TOP_K + choices, expert_ids, mask=is_choice)


def route_topk(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> RoutedExperts:
    """See `Operations.route_topk`. One token a program, one warp: a warp's reductions need no barrier."""
    num_tokens, num_experts = router_logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=router_logits.device)
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=router_logits.device)
    if num_tokens:
        _route_topk_kernel[(num_tokens,)](
            router_logits,
            weights,
            expert_ids,
            num_experts,
            router_logits.stride(0),
            router_logits.stride(1),
            TOP_K=top_k,
            RENORMALISE=renormalise,
            BLOCK_E=power_of_two_from(num_experts),
            BLOCK_CHOICES=power_of_two_from(top_k),
            num_warps=1,
        )
    return RoutedExperts(weights, expert_ids)


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
    """See `Operations.sort_tokens_by_expert`. Other ids than 0 .. num_experts - 1 are not refused: the host would have
    to wait for the GPU.
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


@triton.jit(do_not_specialize=["num_pairs"])
def _invert_kernel(
    pair_ids_ptr,  # [P], int64
    places_ptr,  # [P], int32
    num_pairs,
    BLOCK: tl.constexpr,
):
    """The row at which each pair lies.

    Grid: (cdiv(P, BLOCK),)
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_pairs
    pairs = tl.load(pair_ids_ptr + rows, mask=is_row, other=0)
    tl.store(places_ptr + pairs, rows, mask=is_row)


@triton.jit
def _combine_experts_kernel(
    rows_ptr,  # [T * TOP_K, H], model dtype
    places_ptr,  # [T * TOP_K], int32
    weights_ptr,  # [T, TOP_K], float32
    out_ptr,  # [T, H], model dtype
    hidden_size,
    stride_rows_row,
    stride_rows_column,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of one token: its choices in their order, so that the sum is always the same.

    Grid: (T, cdiv(H, BLOCK))
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < hidden_size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):  # unrolled: the reads of all choices are in flight together
        place = tl.load(places_ptr + token * TOP_K + choice).to(tl.int64)
        row_ptrs = rows_ptr + place * stride_rows_row + columns * stride_rows_column
        row = tl.load(row_ptrs, mask=is_column, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + token * TOP_K + choice) * row
    tl.store(out_ptr + token * hidden_size + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)


def combine_experts(rows: torch.Tensor, layout: ExpertLayout, weights: torch.Tensor) -> torch.Tensor:
    """See `Operations.combine_experts`."""
    num_tokens, top_k = weights.shape
    num_pairs, hidden_size = rows.shape
    out = torch.empty(num_tokens, hidden_size, dtype=rows.dtype, device=rows.device)
    if num_tokens == 0:
        return out
    places = torch.empty(num_pairs, dtype=torch.int32, device=rows.device)
    _invert_kernel[(triton.cdiv(num_pairs, INVERT_BLOCK),)](
        layout.pair_ids, places, num_pairs, BLOCK=INVERT_BLOCK, num_warps=4
    )
    launch = combine_launch(num_tokens, hidden_size)
    _combine_experts_kernel[(num_tokens, triton.cdiv(hidden_size, launch.columns))](
        rows,
        places,
        weights.contiguous(),
        out,
        hidden_size,
        *rows.stride(),
        TOP_K=top_k,
        BLOCK=launch.columns,
        num_warps=launch.num_warps,
    )
    return out


def expert_scan_launch(num_pairs: int) -> TileLaunch:
    """One program an expert: columns = ids read at once."""
    return TileLaunch(1, min(max(power_of_two_from(num_pairs), 128), 1024), 4)


def expert_count_launch() -> TileLaunch:
    """One program a block of ids. columns = ids of a block, each compared with `rows` of them at a time.

    256 x 32 comparisons are 32 a thread of 8 warps (4 warps take 228 registers). The counts of 65,536 pairs (8192
    tokens, 8 choices) over 128 experts are 128 KB, which every program sums.
    """
    return TileLaunch(32, 256, 8)


def combine_launch(num_tokens: int, hidden_size: int) -> TileLaunch:
    """columns = elements of a token that a program sums: 16 bytes of bfloat16 a thread and choice.

    A few tokens are cut finer, so that 64 tokens of width 2048 make 512 programs and not 128.
    """
    num_warps = 1 if num_tokens <= 256 else 4
    return TileLaunch(1, min(power_of_two_from(hidden_size), 256 * num_warps), num_warps)
