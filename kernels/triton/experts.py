"""Mixture of experts before the matrix products: routes tokens and sorts them by expert.

None of the launch parameters is measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
import triton
import triton.language as tl

from kernels.operands import ExpertLayout, RoutedExperts
from kernels.triton.grouped_gemm import TILE_FIELDS, max_row_tiles, row_tile, write_tiles
from kernels.triton.launch import TileLaunch, power_of_two_from

# Up to here one program sorts all pairs, the last one that has routed a token: eight a thread, some 2 us (an estimate).
# With more, each program reads a block and a second launch places it.
MAX_PAIRS_OF_ONE_PROGRAM = 1024


@triton.jit
def _route(
    logits_ptr,  # [E], model dtype: of one token
    weights_ptr,  # [TOP_K], float32: of the token
    expert_ids_ptr,  # [TOP_K], int64: of the token
    num_experts,
    stride_logits_expert,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
):
    """Softmax over the experts of one token, then TOP_K times the largest that is left."""
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < num_experts
    logits = tl.load(logits_ptr + experts * stride_logits_expert, mask=is_expert, other=-float("inf")).to(tl.float32)
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
    tl.store(weights_ptr + choices, weights, mask=is_choice)
    tl.store(expert_ids_ptr + choices, expert_ids, mask=is_choice)


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
    """Grid: (T,)"""
    token = tl.program_id(0).to(tl.int64)
    _route(
        *(logits_ptr + token * stride_logits_token, weights_ptr + token * TOP_K, expert_ids_ptr + token * TOP_K),
        *(num_experts, stride_logits_expert, TOP_K, RENORMALISE, BLOCK_E, BLOCK_CHOICES),
    )


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


@triton.jit
def _sort_few(
    expert_ids_ptr,  # [P], int64
    pair_ids_ptr,  # [P], int64
    places_ptr,  # [P], int32
    expert_offsets_ptr,  # [E + 1], int64
    tiles_ptr,  # as of `write_tiles`
    num_pairs,
    num_experts,
    max_tiles,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Sort up to BLOCK pairs in one program: an integer holds an expert and, below it, a pair."""
    lanes = tl.arange(0, BLOCK)
    is_pair = lanes < num_pairs
    # Past the L1: other programs may have written them a moment ago.
    ids = tl.load(expert_ids_ptr + lanes, mask=is_pair, other=0, cache_modifier=".cg").to(tl.int32)
    keys = tl.sort(tl.where(is_pair, ids * BLOCK + lanes, 0x7FFFFFFF))
    pairs = keys % BLOCK
    tl.store(pair_ids_ptr + lanes, pairs.to(tl.int64), mask=is_pair)
    tl.store(places_ptr + pairs, lanes, mask=is_pair)
    experts = tl.arange(0, BLOCK_E)
    counts = tl.histogram(ids, BLOCK_E, mask=is_pair)
    starts = tl.cumsum(counts, 0) - counts
    tl.store(expert_offsets_ptr + experts, starts.to(tl.int64), mask=experts < num_experts)
    tl.store(expert_offsets_ptr + num_experts, num_pairs.to(tl.int64))
    write_tiles(tiles_ptr, starts, counts, max_tiles, BLOCK_M)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _sort_kernel(
    expert_ids_ptr,  # these and the others: as of `_sort_few`
    pair_ids_ptr,
    places_ptr,
    expert_offsets_ptr,
    tiles_ptr,
    num_pairs,
    num_experts,
    max_tiles,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid: (1,)"""
    _sort_few(
        *(expert_ids_ptr, pair_ids_ptr, places_ptr, expert_offsets_ptr, tiles_ptr),
        *(num_pairs, num_experts, max_tiles, BLOCK, BLOCK_E, BLOCK_M),
    )


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _route_and_sort_kernel(
    logits_ptr,  # [T, E], model dtype
    weights_ptr,  # [T, TOP_K], float32
    expert_ids_ptr,  # [T, TOP_K], int64
    num_routed_ptr,  # [1], int32: 0 before and after
    pair_ids_ptr,  # these and the following: as of `_sort_few`
    places_ptr,
    expert_offsets_ptr,
    tiles_ptr,
    num_pairs,
    num_experts,
    max_tiles,
    stride_logits_token,
    stride_logits_expert,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
):
    """Route one token; the program that comes last sorts the pairs of all.

    Grid: (T,)
    """
    token = tl.program_id(0).to(tl.int64)
    _route(
        *(logits_ptr + token * stride_logits_token, weights_ptr + token * TOP_K, expert_ids_ptr + token * TOP_K),
        *(num_experts, stride_logits_expert, TOP_K, RENORMALISE, BLOCK_E, BLOCK_CHOICES),
    )
    tl.debug_barrier()  # all of this program has written before its arrival is counted, which releases and acquires
    num_before = tl.atomic_add(num_routed_ptr, 1, sem="acq_rel", scope="gpu")
    if num_before < tl.num_programs(0) - 1:
        return
    tl.debug_barrier()
    tl.store(num_routed_ptr, 0)  # for the next launch
    _sort_few(
        *(expert_ids_ptr, pair_ids_ptr, places_ptr, expert_offsets_ptr, tiles_ptr),
        *(num_pairs, num_experts, max_tiles, BLOCK, BLOCK_E, BLOCK_M),
    )


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


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _place_kernel(
    expert_ids_ptr,  # [P], int64
    counts_ptr,  # [num_blocks, E], int32
    pair_ids_ptr,  # these and the following: as of `_sort_few`
    places_ptr,
    expert_offsets_ptr,
    tiles_ptr,
    num_pairs,
    num_experts,
    max_tiles,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
        write_tiles(tiles_ptr, starts, totals, max_tiles, BLOCK_M)

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
    tl.store(places_ptr + pairs, places, mask=pairs < num_pairs)


@dataclass(frozen=True, eq=False)
class _Layout:
    """The tensors of an `ExpertLayout` before they are written, and sizes that go with them."""

    pair_ids: torch.Tensor  # [P], int64
    places: torch.Tensor  # [P], int32
    offsets: torch.Tensor  # [E + 1], int64
    tiles: torch.Tensor  # [max_tiles, TILE_FIELDS], int32
    sizes: tuple[int, int, int]  # num_pairs, num_experts, max_tiles
    blocks: dict[str, int]  # BLOCK_E and BLOCK_M

    @classmethod
    def empty(cls, num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Self:
        num_pairs = num_tokens * top_k
        block_m = row_tile(num_pairs, top_k, num_experts)
        max_tiles = max_row_tiles(num_pairs, num_experts, block_m)
        return cls(
            pair_ids=torch.empty(num_pairs, dtype=torch.int64, device=device),
            places=torch.empty(num_pairs, dtype=torch.int32, device=device),
            offsets=torch.empty(num_experts + 1, dtype=torch.int64, device=device),
            tiles=torch.empty(max_tiles, TILE_FIELDS, dtype=torch.int32, device=device),
            sizes=(num_pairs, num_experts, max_tiles),
            blocks={"BLOCK_E": power_of_two_from(num_experts), "BLOCK_M": block_m},
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of the kernels."""
        return self.pair_ids, self.places, self.offsets, self.tiles

    def sorted(self, top_k: int) -> ExpertLayout:
        """Once it is written."""
        return ExpertLayout(self.pair_ids, self.offsets, top_k, self.places, self.tiles, self.blocks["BLOCK_M"])


def sort_tokens_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertLayout:
    """See `Operations.sort_tokens_by_expert`. Other ids than 0 .. num_experts - 1 are not refused: the host would have
    to wait for the GPU.
    """
    num_tokens, top_k = expert_ids.shape
    layout = _Layout.empty(num_tokens, top_k, num_experts, expert_ids.device)
    _sort(expert_ids.contiguous(), layout)
    return layout.sorted(top_k)


def _sort(ids: torch.Tensor, layout: _Layout) -> None:
    num_pairs, num_experts, _ = layout.sizes
    if num_pairs <= MAX_PAIRS_OF_ONE_PROGRAM:
        launch = sort_launch(num_pairs)
        _sort_kernel[(1,)](
            *(ids, *layout.tensors, *layout.sizes), **layout.blocks, BLOCK=launch.columns, num_warps=launch.num_warps
        )
        return
    launch = expert_count_launch()
    grid = (triton.cdiv(num_pairs, launch.columns),)
    counts = torch.empty(grid[0], num_experts, dtype=torch.int32, device=ids.device)
    options = {"BLOCK": launch.columns, "num_warps": launch.num_warps}
    _count_kernel[grid](ids, counts, num_pairs, num_experts, BLOCK_E=layout.blocks["BLOCK_E"], **options)
    _place_kernel[grid](*(ids, counts, *layout.tensors, *layout.sizes), **layout.blocks, CHUNK=launch.rows, **options)


def route_and_sort(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, ExpertLayout]:
    """See `Operations.route_and_sort`. Up to MAX_PAIRS_OF_ONE_PROGRAM pairs take one launch."""
    num_tokens, num_experts = router_logits.shape
    if not 0 < num_tokens * top_k <= MAX_PAIRS_OF_ONE_PROGRAM:
        routed = route_topk(router_logits, top_k, renormalise=renormalise)
        return routed.weights, sort_tokens_by_expert(routed.expert_ids, num_experts)
    device = router_logits.device
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)
    layout, launch = _Layout.empty(num_tokens, top_k, num_experts, device), sort_launch(num_tokens * top_k)
    _route_and_sort_kernel[(num_tokens,)](
        *(router_logits, weights, expert_ids, _num_routed(device), *layout.tensors, *layout.sizes),
        *router_logits.stride(),
        TOP_K=top_k,
        RENORMALISE=renormalise,
        BLOCK=launch.columns,
        **layout.blocks,
        BLOCK_CHOICES=power_of_two_from(top_k),
        num_warps=launch.num_warps,
    )
    return weights, layout.sorted(top_k)


@lru_cache(maxsize=16)
def _num_routed(device: torch.device) -> torch.Tensor:
    """A device's count of programs that have routed, which each launch leaves at 0: zeroing it would be one more."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def sort_launch(num_pairs: int) -> TileLaunch:
    """One program: columns = pairs, up to eight a thread; the 128 experts of a token are one a thread."""
    return TileLaunch(1, max(power_of_two_from(num_pairs), 16), 4)


def expert_count_launch() -> TileLaunch:
    """One program a block of ids. columns = ids of a block, each compared with `rows` of them at a time.

    256 x 32 comparisons are 32 a thread of 8 warps (4 warps take 228 registers). The counts of 65,536 pairs (8192
    tokens, 8 choices) over 128 experts are 128 KB, which every program sums.
    """
    return TileLaunch(32, 256, 8)
