"""Lays quantised weights out for the kernels, and says which schemes have none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.interface import KernelsUnavailable
from kernels.operands import PackedWeight
from kernels.quantised import SLAB_ELEMENTS, QuantisedWeight, WeightScheme

Tensor = torch.Tensor
LEAST_STEP, LEAST_STEP_OF_BYTES = 16, 32  # of tl.dot, and of its operands of 8 bits
MOST_STEP = {4: 64, 8: 128}  # inputs of a dot: of 4 bits a byte holds two, which a step takes one after the other
# Of both halves where inputs are reordered: the addresses of 128 inputs of 128 tokens spill up to 112 bytes on sm_80.
MOST_IN_ORDER = 64


@dataclass(frozen=True, eq=False)
class PackedSteps(PackedWeight):
    """A quantised weight [N, K] or [E, N, K] in steps of `block_k` inputs, each within a group or of two whole halves.

    K is filled up to whole steps; what is there meets no activation.
    """

    scheme: WeightScheme
    block_k: int
    # 8 bits: uint8, int8 or float8 [.., N, K], as they are; 4 bits: uint8 [.., N, K / 2], of each step the inputs of
    # the first half in the lower halves of its bytes, those of the second half in the upper ones
    values: Tensor
    scales: Tensor  # [.., G, R]
    zero_points: Tensor | None  # [.., R, G], uint8: beside 8 bits 128 more than the scheme's
    input_order: Tensor | None  # [.., K], int32
    input_scale: Tensor | None  # [1], float32


def pack_steps(weight: QuantisedWeight) -> PackedSteps:
    """A weight for the kernels. Raises KernelsUnavailable for a scheme that they do not multiply."""
    scheme = weight.scheme
    check_scheme(scheme)
    block_k = step_of(scheme) * (2 if scheme.bits == 4 else 1)
    if weight.input_order is not None:
        block_k = min(block_k, MOST_IN_ORDER)
    zeros = weight.zero_points
    if zeros is not None and scheme.bits == 8:
        zeros = zeros.view(torch.uint8) ^ 128
    scales, zeros = weight.scales.mT.contiguous(), None if zeros is None else zeros.contiguous()
    order = None if weight.input_order is None else weight.input_order.int()
    # Of experts the largest: a token is rounded once for all of its experts.
    input_scale = None if weight.input_scale is None else weight.input_scale.amax().reshape(1)
    values = _in_steps(weight, block_k)
    parts = tuple(part for part in (values, scales, zeros, order, input_scale) if part is not None)
    return PackedSteps(parts, weight.shape, scheme, block_k, values, scales, zeros, order, input_scale)


def check_scheme(scheme: WeightScheme) -> None:
    """Raise KernelsUnavailable for a scheme that the kernels do not multiply."""
    size = scheme.group_size
    reason = None
    if step_of(scheme) < LEAST_STEP:
        reason = f"accepted: groups of a multiple of {LEAST_STEP}"
    elif scheme.activations == "int8_token" and (scheme.bits != 8 or scheme.is_float or not scheme.symmetric):
        reason = "accepted: activations of 8 bits beside symmetric integers of 8 bits"
    elif scheme.activations == "int8_token" and step_of(scheme) < LEAST_STEP_OF_BYTES:
        reason = f"accepted: groups of a multiple of {LEAST_STEP_OF_BYTES} beside activations of 8 bits"
    elif scheme.activations == "float8_group" and size is None:
        reason = "accepted: activations in groups beside weights in groups"
    if reason is not None:
        raise KernelsUnavailable("cuda", f"there are no products with weights of {scheme}; {reason}, or cpu")


def step_of(scheme: WeightScheme) -> int:
    """Inputs of one dot, all of one group."""
    most, size = MOST_STEP[scheme.bits], scheme.group_size
    return most if size is None else min(most, size & -size)


def _in_steps(weight: QuantisedWeight, block_k: int) -> Tensor:
    """The values in whole steps, copied a few rows at a time, or as they are where that is the same."""
    values, width = weight.values, weight.shape[-1]
    filled = -(-width // block_k) * block_k
    if weight.scheme.bits == 8 and filled == width:
        return values
    *lead, num_rows, stored = values.shape
    per_byte = width // stored
    rows = values.view(torch.uint8).view(-1, stored)
    out = rows.new_zeros(len(rows), filled // per_byte)
    slab = max(SLAB_ELEMENTS // filled, 1)
    for start in range(0, len(rows), slab):
        part = torch.nn.functional.pad(rows[start : start + slab], (0, (filled - width) // per_byte))
        out[start : start + slab] = _halves_of_steps(part, block_k) if per_byte == 2 else part
    return out.view(values.dtype).view(*lead, num_rows, -1)


def _halves_of_steps(rows: Tensor, block_k: int) -> Tensor:
    """Bytes of neighbouring inputs [n, K / 2] -> bytes whose inputs lie half a step apart [n, K / 2]."""
    nibbles = torch.stack((rows & 15, rows >> 4), dim=2).view(len(rows), -1, 2, block_k // 2)
    return (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).view(len(rows), -1)
