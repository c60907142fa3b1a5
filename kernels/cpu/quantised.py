"""Products with weights on a CPU, quantised ones and plain: the operations `pack`, `linear` and those of experts.

A quantised weight stays packed in memory: a product turns a few rows of it at a time into the dtype of the activations
and multiplies them. Activations of 8 bits are rounded as the scheme says where they are integers; float8 ones are left
as they are, which only adds precision.
"""

from __future__ import annotations

from typing import cast

import torch

from kernels.cpu import dense, experts, int8
from kernels.operands import ExpertLayout, PackedWeight, RoutedExperts
from kernels.quantised import NIBBLE_ZERO, PackedQuantised, QuantisedWeight, WeightScheme, quantise

Tensor = torch.Tensor
FLOAT16_BITS = ~(1 << 14)  # all but the copy of the sign that widening and shifting leave in the exponent
INT8_CHANNELS = WeightScheme(bits=8, is_float=False, group_size=None, activations="int8_token")
TILE_ELEMENTS = 1 << 18  # of a weight, dequantised at a time: 1 MiB of float32, which stays in cache


def pack(weight: Tensor | QuantisedWeight, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. A quantised weight as it is, or in oneDNN's layout where that multiplies it."""
    if not isinstance(weight, QuantisedWeight):
        return dense.pack(weight, keep_dtype=keep_dtype)
    if int8.is_multiplied(weight):
        return int8.pack(weight)
    return PackedQuantised.as_loaded(weight)


def round_and_pack(weight: Tensor | QuantisedWeight, *, keep_dtype: bool = False) -> PackedWeight:
    """`Operations.pack` of `kernels.int8`: each output channel is rounded with the scale that makes its largest
    magnitude 127.
    """
    if keep_dtype or isinstance(weight, QuantisedWeight):
        return pack(weight, keep_dtype=keep_dtype)
    return pack(quantise(weight, INT8_CHANNELS))


def linear(x: Tensor, weight: PackedWeight, *, gated: bool = False) -> Tensor:
    """See `Operations.linear`."""
    if isinstance(weight, int8.PackedInt8):
        out = int8.linear(x, weight)
    elif isinstance(weight, PackedQuantised):
        out = product(x, weight.weight)
    else:
        return dense.linear(x, weight, gated=gated)
    return dense.silu_and_mul(out) if gated else out


def grouped_gemm(x: Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False) -> Tensor:
    """See `Operations.grouped_gemm`."""
    if isinstance(weight, int8.PackedInt8):
        rows = int8.grouped_gemm(x, weight, layout, gather=gather)
    elif isinstance(weight, PackedQuantised):
        rows = experts.products_by_expert(x, weight, layout, expert_product, gather=gather)
    else:
        return experts.grouped_gemm(x, weight, layout, gather=gather, gated=gated)
    return dense.silu_and_mul(rows) if gated else rows


def moe_small_batch(x: Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> Tensor:
    """See `Operations.moe_small_batch`. Quantised experts are sorted all the same, so each is dequantised once."""
    if isinstance(gate_up, int8.PackedInt8) and isinstance(down, int8.PackedInt8):
        return int8.moe_small_batch(x, gate_up, down, routed)
    if not isinstance(gate_up, PackedQuantised) and not isinstance(down, PackedQuantised):
        return experts.moe_small_batch(x, gate_up, down, routed)
    layout = experts.sort_tokens_by_expert(routed.expert_ids, gate_up.shape[0])
    hidden = grouped_gemm(x, gate_up, layout, gather=True, gated=True)
    return experts.combine_experts(grouped_gemm(hidden, down, layout, gather=False), layout, routed.weights)


def expert_product(x: Tensor, weight: PackedWeight, expert: int) -> Tensor:
    """x [T, K], a quantised weight [E, N, K] -> [T, N]."""
    return product(x, cast("PackedQuantised", weight).weight.matrices[expert])


def product(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """x [T, K] times a quantised matrix [N, K] -> [T, N], both in one floating dtype; float16 is computed in float32.

    Each element of the weight is rounded to the dtype of the product once.
    """
    dtype, num_rows = x.dtype, weight.shape[0]
    x = prepared(x, weight)
    out = x.new_empty(x.shape[0], num_rows)
    step = tile_rows(weight)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        torch.mm(x, dequantise(weight, start, stop, x.dtype).t(), out=out[:, start:stop])
    return out.to(dtype)


def prepared(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """Activations [T, K] as the weight takes them: in its order of inputs, rounded (then float32) where it says so."""
    if weight.input_order is not None:
        x = x.index_select(1, weight.input_order)
    if weight.scheme.activations == "int8_token":
        rounded = int8.quantise_rows(x)
        return (rounded.values.float() - int8.ZERO_POINT) * rounded.scales
    return x.float() if x.dtype is torch.float16 else x


def tile_rows(weight: QuantisedWeight) -> int:
    """Rows to dequantise at a time: whole blocks, at least one."""
    block = weight.scheme.block_rows or 1
    return max(TILE_ELEMENTS // (weight.shape[-1] * block), 1) * block


def dequantise(weight: QuantisedWeight, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows start .. stop - 1 of a matrix [N, K], start at the beginning of a block -> [stop - start, K] in dtype."""
    block = weight.scheme.block_rows or 1
    blocks = slice(start // block, -(-stop // block))
    wide = _wide(weight, start, stop)
    groups = wide.view(stop - start, -1, weight.group_size) if wide.shape[1] % weight.group_size == 0 else None
    if weight.zero_points is not None:
        zeros = _of_each_row(weight.zero_points[blocks], block, stop - start)
        if groups is not None:
            groups.sub_(zeros.unsqueeze(2))
        else:
            wide.sub_(_of_each_input(zeros, weight))
    elif weight.scheme.bits == 4:
        wide.sub_(NIBBLE_ZERO)
    scales = _of_each_row(weight.scales[blocks], block, stop - start)
    if groups is not None:
        groups.mul_(scales.unsqueeze(2))
    else:
        wide.mul_(_of_each_input(scales, weight))
    return wide.to(dtype)


def _wide(weight: QuantisedWeight, start: int, stop: int) -> Tensor:
    """The values of these rows [n, K], float32."""
    values = weight.values[start:stop]
    if weight.scheme.is_float:
        # The bits of e4m3 within float16's, whose exponent is 8 higher; twice as fast as PyTorch's conversion (2.0 to
        # 2.1 times in processor time, 256 x 1024, one thread of a Zen 4).
        bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(FLOAT16_BITS)
        return bits.view(torch.float16).float().mul_(256)
    if weight.scheme.bits == 8:
        return values.float()
    wide = torch.empty(stop - start, weight.shape[1])
    wide[:, 0::2] = values & 15
    wide[:, 1::2] = values >> 4
    return wide


def _of_each_row(of_blocks: Tensor, block: int, num_rows: int) -> Tensor:
    """[blocks, G] -> [num_rows, G] float32."""
    wide = of_blocks.float()
    return wide if block == 1 else wide.repeat_interleave(block, 0)[:num_rows]


def _of_each_input(of_groups: Tensor, weight: QuantisedWeight) -> Tensor:
    """[n, G] -> [n, K], where the last group is a shorter one."""
    return of_groups.repeat_interleave(weight.group_size, 1)[:, : weight.shape[1]]
