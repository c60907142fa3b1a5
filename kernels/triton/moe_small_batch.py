"""The expert layer for a few tokens: vector times matrix, a (token, choice) pair at a time, nothing sorted.

None of the launch parameters is measured yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.operands import PackedWeight, RoutedExperts
from kernels.triton.launch import TileLaunch, power_of_two_from

# Weights of one step: eight copies of 16 bytes for each of 128 threads, 16 KB of bfloat16, with two steps in flight.
# An H200 needs 4.3 TB/s x 0.7 us = 3 MB in flight, 23 KB on each of its 132 multiprocessors.
ELEMENTS_OF_A_STEP = 8192


@triton.jit
def _gate_up_silu_kernel(
    x_ptr,  # [T, H], model dtype
    gate_up_ptr,  # [E, 2I, H], model dtype, gates first
    hidden_ptr,  # [T * TOP_K, I], model dtype
    expert_ids_ptr,  # [T * TOP_K], int64
    intermediate_size,
    hidden_size,
    stride_x_token,
    stride_x_depth,
    stride_gate_up_expert,
    stride_gate_up_row,
    stride_gate_up_depth,
    TOP_K: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """silu(gate) * up of one pair for BLOCK_ROWS gates and their ups, each rounded as a linear's output is.

    Grid: (T * TOP_K, cdiv(I, BLOCK_ROWS))
    """
    pair = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    weight_rows = tl.minimum(rows, intermediate_size - 1)  # past the end: computed again, not stored
    ks = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + pair // TOP_K * stride_x_token + ks * stride_x_depth
    gate_ptrs = gate_up_ptr + tl.load(expert_ids_ptr + pair) * stride_gate_up_expert
    gate_ptrs += weight_rows[:, None] * stride_gate_up_row + ks[None, :] * stride_gate_up_depth
    up_ptrs = gate_ptrs + intermediate_size * stride_gate_up_row
    gates = tl.zeros([BLOCK_ROWS, BLOCK_K], dtype=tl.float32)
    ups = tl.zeros([BLOCK_ROWS, BLOCK_K], dtype=tl.float32)
    for _ in tl.range(0, hidden_size // BLOCK_K, num_stages=3):  # without a dot Triton overlaps reads only if told to
        x = tl.load(x_ptrs).to(tl.float32)[None, :]
        gates += tl.load(gate_ptrs).to(tl.float32) * x
        ups += tl.load(up_ptrs).to(tl.float32) * x
        x_ptrs += BLOCK_K * stride_x_depth
        gate_ptrs += BLOCK_K * stride_gate_up_depth
        up_ptrs += BLOCK_K * stride_gate_up_depth
    if HAS_TAIL:
        is_tail = ks < hidden_size % BLOCK_K
        x = tl.load(x_ptrs, mask=is_tail, other=0.0).to(tl.float32)[None, :]
        gates += tl.load(gate_ptrs, mask=is_tail[None, :], other=0.0).to(tl.float32) * x
        ups += tl.load(up_ptrs, mask=is_tail[None, :], other=0.0).to(tl.float32) * x
    gate = tl.sum(gates, 1).to(x_ptr.dtype.element_ty).to(tl.float32)
    up = tl.sum(ups, 1).to(x_ptr.dtype.element_ty).to(tl.float32)
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    hidden_ptrs = hidden_ptr + pair * intermediate_size + rows
    tl.store(hidden_ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=rows < intermediate_size)


@triton.jit
def _down_combine_kernel(
    hidden_ptr,  # [T * TOP_K, I], model dtype
    down_ptr,  # [E, H, I], model dtype
    out_ptr,  # [T, H], model dtype
    weights_ptr,  # [T, TOP_K], float32
    expert_ids_ptr,  # [T * TOP_K], int64
    intermediate_size,
    hidden_size,
    stride_down_expert,
    stride_down_row,
    stride_down_depth,
    TOP_K: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_ROWS outputs of one token. One program sums all its choices, so that the result is always the same, and
    reads them side by side, so that it waits for memory once.

    Grid: (T, cdiv(H, BLOCK_ROWS))
    """
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    weight_rows = tl.minimum(rows, hidden_size - 1)  # past the end: computed again, not stored
    choices = tl.arange(0, BLOCK_CHOICES)
    pairs = token * TOP_K + tl.minimum(choices, TOP_K - 1)  # choices past the last: again the last, not summed
    experts = tl.load(expert_ids_ptr + pairs)
    ks = tl.arange(0, BLOCK_K)
    hidden_ptrs = hidden_ptr + pairs[:, None, None] * intermediate_size + ks[None, None, :]
    down_ptrs = down_ptr + experts[:, None, None] * stride_down_expert
    down_ptrs += weight_rows[None, :, None] * stride_down_row + ks[None, None, :] * stride_down_depth
    totals = tl.zeros([BLOCK_CHOICES, BLOCK_ROWS, BLOCK_K], dtype=tl.float32)
    for _ in tl.range(0, intermediate_size // BLOCK_K, num_stages=3):
        totals += tl.load(down_ptrs).to(tl.float32) * tl.load(hidden_ptrs).to(tl.float32)
        hidden_ptrs += BLOCK_K
        down_ptrs += BLOCK_K * stride_down_depth
    if HAS_TAIL:
        is_tail = (ks < intermediate_size % BLOCK_K)[None, None, :]
        down = tl.load(down_ptrs, mask=is_tail, other=0.0).to(tl.float32)
        totals += down * tl.load(hidden_ptrs, mask=is_tail, other=0.0).to(tl.float32)
    outputs = tl.sum(totals, 2).to(out_ptr.dtype.element_ty).to(tl.float32)
    weighted = outputs * tl.load(weights_ptr + pairs)[:, None]
    out = tl.sum(tl.where(choices[:, None] < TOP_K, weighted, 0.0), 0)
    tl.store(out_ptr + token * hidden_size + rows, out.to(out_ptr.dtype.element_ty), mask=rows < hidden_size)


def moe_small_batch(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`."""
    num_tokens, top_k = routed.expert_ids.shape
    sizes = intermediate_size, hidden_size = down.shape[2], down.shape[1]
    hidden = torch.empty(num_tokens * top_k, intermediate_size, dtype=x.dtype, device=x.device)
    out = torch.empty(num_tokens, hidden_size, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    weights, expert_ids = routed.weights.contiguous(), routed.expert_ids.contiguous()
    launch = gate_up_launch(hidden_size, x.itemsize)
    _gate_up_silu_kernel[(num_tokens * top_k, triton.cdiv(intermediate_size, launch.rows))](
        x,
        gate_up.tensor,
        hidden,
        expert_ids,
        *sizes,
        *x.stride(),
        *gate_up.tensor.stride(),
        TOP_K=top_k,
        HAS_TAIL=hidden_size % launch.columns > 0,
        BLOCK_ROWS=launch.rows,
        BLOCK_K=launch.columns,
        num_warps=launch.num_warps,
    )
    launch = down_launch(intermediate_size, top_k, x.itemsize)
    _down_combine_kernel[(num_tokens, triton.cdiv(hidden_size, launch.rows))](
        hidden,
        down.tensor,
        out,
        weights,
        expert_ids,
        *sizes,
        *down.tensor.stride(),
        TOP_K=top_k,
        HAS_TAIL=intermediate_size % launch.columns > 0,
        BLOCK_CHOICES=power_of_two_from(top_k),
        BLOCK_ROWS=launch.rows,
        BLOCK_K=launch.columns,
        num_warps=launch.num_warps,
    )
    return out


def gate_up_launch(hidden_size: int, itemsize: int) -> TileLaunch:
    """The first half: rows = gates of a program, which takes as many ups; columns = depth of a step.

    One token of Qwen3-30B-A3B (8 pairs, 768 gates, depth 2048) makes 768 programs, six a multiprocessor.
    """
    columns = min(power_of_two_from(hidden_size), 1024 // itemsize)
    return TileLaunch(ELEMENTS_OF_A_STEP // 2 // 512, columns, 4)


def down_launch(intermediate_size: int, top_k: int, itemsize: int) -> TileLaunch:
    """The second half: rows = outputs of a program, columns = depth of a step, for all choices at once.

    One token of Qwen3-30B-A3B makes 512 programs. A depth of 256 divides its 768. It does not divide the 1408 of
    GLM-4.5-Air and Qwen1.5-MoE, and half of it does: as many elements in twice the rows, since a tail took all 255
    registers of a thread, against 120, and spilled 56 bytes on sm_90 with 8 choices.
    """
    choices = power_of_two_from(top_k)
    columns = min(power_of_two_from(intermediate_size), 512 // itemsize, max(ELEMENTS_OF_A_STEP // choices, 1))
    rows = max(ELEMENTS_OF_A_STEP // 256 // choices, 1)
    if intermediate_size % columns and columns == 256 and intermediate_size % 128 == 0:
        rows, columns = 2 * rows, 128
    return TileLaunch(rows, columns, 4)
