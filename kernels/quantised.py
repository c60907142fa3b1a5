"""Weights of 4 and 8 bits: how they were rounded, as data, and the one form in which every product takes them.

A loader brings each published format into this form, so products know no format. An element of a matrix [N, K] is
`(value - zero point) * scale`; a scale is shared by `block_rows` rows and `group_size` inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

import torch

from kernels.operands import PackedWeight

Tensor = torch.Tensor
# How activations are rounded before a product: not at all; to integers or to e4m3 with a scale a token that makes its
# largest magnitude 127 or 448; to e4m3 with a scale a token and group of inputs; with one scale for all, which the
# checkpoint holds.
Activations = Literal["none", "int8_token", "float8_token", "float8_group", "float8_tensor"]

NIBBLE_ZERO = 8  # what an unsigned value of 4 bits stands for zero with, where there are no zero points
LARGEST_INT8, LARGEST_INT4 = 127, 7  # symmetric rounding: -128 and -8 are not used, so a row and its negative are alike
LARGEST_FLOAT8 = 448.0  # of e4m3
# With less, 127 / largest would overflow. What is that small becomes zeros: its products are next to nothing.
LEAST_LARGEST_VALUE = 1e-36
SLAB_ELEMENTS = 1 << 20  # of a weight, rounded at a time: 4 MiB in float32


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How a weight is rounded. Says nothing of the format of its files."""

    bits: Literal[4, 8]
    is_float: bool  # float8 e4m3 rather than integers; 8 bits only
    group_size: int | None  # inputs that share a scale, the last group may be shorter; None: all inputs of a row
    block_rows: int | None = 1  # rows that share a scale, likewise; None: all rows of the stored tensor
    symmetric: bool = True  # no zero points
    activations: Activations = "none"

    def __str__(self) -> str:
        number = "float8" if self.is_float else f"int{self.bits}"
        if self.block_rows is None:
            scales = "one scale a tensor"
        elif self.block_rows > 1:
            scales = f"blocks of {self.block_rows} x {self.group_size}"
        else:
            scales = "one scale a channel" if self.group_size is None else f"groups of {self.group_size}"
        zeros = "" if self.symmetric else ", zero points"
        activations = "" if self.activations == "none" else f", activations {self.activations.replace('_', ' a ')}"
        return f"{number}, {scales}{zeros}{activations}"


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A weight [N, K], or [E, N, K] for experts, of 4 or 8 bits: what a loader makes and `Operations.pack` takes.

    G is K / group_size and R is N / block_rows, both rounded up. All tensors are contiguous and on one device. Raises
    ValueError for tensors that do not fit each other or the scheme.
    """

    scheme: WeightScheme  # its block_rows is a number: a scale for the whole tensor is written for each row
    # 4 bits: uint8 [.., N, K / 2], the even input in the lower half of each byte; else [.., N, K] in int8 or, without
    # NaN, in float8_e4m3fn
    values: Tensor
    scales: Tensor  # [.., R, G], float32, bfloat16 or float16
    # [.., R, G], uint8 beside 4 bits and int8 beside 8; None: symmetric, with 8 beside 4 bits and 0 beside 8
    zero_points: Tensor | None = None
    # [.., K] int64: which element of x meets each input of `values`, so that groups lie side by side; None: its own
    input_order: Tensor | None = None
    input_scale: Tensor | None = None  # [] or [E], float32, beside float8_tensor alone: x is about its e4m3 times this

    def __post_init__(self) -> None:
        scheme, lead = self.scheme, self.values.shape[:-2]
        if scheme.block_rows is None:
            raise ValueError(f"block_rows is None; accepted: a number; scheme {scheme}")
        num_rows, width = self.shape[-2:]
        grid = (*lead, _blocks(num_rows, scheme.block_rows), _blocks(width, scheme.group_size or width))
        dtype = torch.float8_e4m3fn if scheme.is_float else torch.int8 if scheme.bits == 8 else torch.uint8
        zeros_dtype = torch.uint8 if scheme.bits == 4 else torch.int8
        floats = (torch.float32, torch.bfloat16, torch.float16)
        _check("values", self.values, tuple(self.values.shape), (dtype,))
        _check("scales", self.scales, grid, floats)
        if scheme.symmetric != (self.zero_points is None):
            raise ValueError(f"zero_points: {self.zero_points is not None}; scheme {scheme}")
        _check("zero_points", self.zero_points, grid, (zeros_dtype,))
        _check("input_order", self.input_order, (*lead, width), (torch.int64,))
        if (scheme.activations == "float8_tensor") != (self.input_scale is not None):
            raise ValueError(f"input_scale: {self.input_scale is not None}; scheme {scheme}")
        _check("input_scale", self.input_scale, tuple(lead), (torch.float32,))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: [N, K] or [E, N, K]."""
        *lead, stored = self.values.shape
        return (*lead, stored * 2 if self.scheme.bits == 4 else stored)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale: a number where the scheme says all."""
        return self.scheme.group_size or self.shape[-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it is made of."""
        stored = (self.values, self.scales, self.zero_points, self.input_order, self.input_scale)
        return tuple(tensor for tensor in stored if tensor is not None)

    @cached_property
    def matrices(self) -> tuple[Self, ...]:
        """Each expert's matrix [N, K] as views, made once; of a weight [N, K] itself."""
        if self.values.dim() == 2:
            return (self,)
        count = self.values.shape[0]
        optional = (self.zero_points, self.input_order, self.input_scale)
        rest = [[None] * count if tensor is None else tensor.unbind() for tensor in optional]
        parts = zip(self.values.unbind(), self.scales.unbind(), *rest, strict=True)
        return tuple(replace(self, **dict(zip(_TENSORS, part, strict=True))) for part in parts)


_TENSORS = ("values", "scales", "zero_points", "input_order", "input_scale")


@dataclass(frozen=True, eq=False)
class PackedQuantised(PackedWeight):
    """A quantised weight as the loader made it: what `pack` answers where a product reads that form."""

    weight: QuantisedWeight

    @classmethod
    def as_loaded(cls, weight: QuantisedWeight) -> Self:
        """Its tensors are the parts."""
        return cls(weight.tensors, weight.shape, weight)


def quantise(weight: Tensor, scheme: WeightScheme, scales_dtype: torch.dtype = torch.float32) -> QuantisedWeight:
    """Round a weight [N, K] or [E, N, K] of a floating dtype to the nearest of a symmetric scheme with a scale a row.

    Each scale, rounded to its dtype first, makes the largest magnitude of its group 127, 7 or 448. Raises ValueError
    for another scheme, or where K is odd beside 4 bits.
    """
    if not scheme.symmetric or scheme.block_rows != 1 or (scheme.bits == 4 and weight.shape[-1] % 2):
        raise ValueError(f"weight {list(weight.shape)}; accepted: a symmetric scheme with scales a row, not {scheme}")
    *lead, width = weight.shape
    rows = weight.reshape(-1, width)
    group = scheme.group_size or width
    dtype = torch.float8_e4m3fn if scheme.is_float else torch.int8 if scheme.bits == 8 else torch.uint8
    values = torch.empty(rows.shape[0], width // 2 if scheme.bits == 4 else width, dtype=dtype, device=weight.device)
    scales = torch.empty(rows.shape[0], _blocks(width, group), dtype=scales_dtype, device=weight.device)
    step = max(SLAB_ELEMENTS // width, 1)
    for start in range(0, rows.shape[0], step):
        slab = slice(start, start + step)
        values[slab], scales[slab] = _round_rows(rows[slab].float(), group, scheme, scales_dtype)
    return QuantisedWeight(scheme, values.view(*lead, -1), scales.view(*lead, -1))


def _round_rows(rows: Tensor, group: int, scheme: WeightScheme, scales_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and scales [n, G] of rows [n, K] float32."""
    num_rows, width = rows.shape
    filled = torch.nn.functional.pad(rows, (0, -width % group)).view(num_rows, -1, group)
    largest = LARGEST_FLOAT8 if scheme.is_float else LARGEST_INT8 if scheme.bits == 8 else LARGEST_INT4
    scales = (filled.abs().amax(2, keepdim=True) / largest).to(scales_dtype)
    # A scale that was rounded down would take the largest one step too far; one of next to nothing is 0 in float16.
    least = max(LEAST_LARGEST_VALUE / largest, torch.finfo(scales_dtype).tiny)
    scales = scales.clamp_(min=least)
    steps = (filled / scales.float()).clamp_(-largest, largest).view(num_rows, -1)[:, :width]
    if scheme.is_float:
        return steps.to(torch.float8_e4m3fn), scales.squeeze(2)
    integers = steps.round().to(torch.int8)
    return pack_nibbles(integers + NIBBLE_ZERO) if scheme.bits == 4 else integers, scales.squeeze(2)


def pack_nibbles(values: Tensor) -> Tensor:
    """Integers 0 to 15 [.., K] -> uint8 [.., K / 2], the even one in the lower half of each byte."""
    values = values.to(torch.uint8)
    return values[..., 0::2] | values[..., 1::2] << 4


def _blocks(size: int, step: int) -> int:
    return -(-size // step)


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype not in dtypes):
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; accepted: {dtypes} {list(shape)}")
