"""Rows of activations rounded to 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST = 127  # symmetric: -128 is not used, so that a row and its negative round alike
ZERO_POINT = 128  # oneDNN's products are fast for unsigned activations alone: 800 against 0.2 GOP/s for signed ones
# Rows are worked on in slabs of 1 MiB of float32, which stay in cache between the passes.
SLAB_ELEMENTS = 1 << 18
# Below, 127 / largest would overflow. Such a row becomes zeros, as it is for any product in float32.
LEAST_LARGEST_VALUE = 1e-36


class QuantisedRows(NamedTuple):
    """Row i is `(values[i] - ZERO_POINT) * scales[i]`."""

    values: torch.Tensor  # [T, K], uint8, 1 to 255
    scales: torch.Tensor  # [T, 1], float32

    def split(self, counts: list[int]) -> list[QuantisedRows]:
        """Runs of neighbouring rows of these lengths, not copied."""
        parts = zip(torch.split(self.values, counts), torch.split(self.scales, counts), strict=True)
        return [QuantisedRows(values, scales) for values, scales in parts]

    def select(self, rows: torch.Tensor) -> QuantisedRows:
        """The rows of these indices [n] int64."""
        return QuantisedRows(self.values.index_select(0, rows), self.scales.index_select(0, rows))


def quantise_rows(x: torch.Tensor) -> QuantisedRows:
    """x [T, K] of a floating dtype -> its rows, each with the scale that makes its largest magnitude 127.

    Rounded half to even. A row with a value that is not finite gets a scale that is not, and so shows in its products.
    """
    values = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(x.shape[0], 1)
    step = max(SLAB_ELEMENTS // max(x.shape[1], 1), 1)
    for start in range(0, x.shape[0], step):
        slab = slice(start, start + step)
        rows = x[slab].float()
        largest = rows.abs().amax(1, keepdim=True).clamp_(min=LEAST_LARGEST_VALUE)
        rounded = torch.mul(rows, LARGEST / largest).round_()
        # To int8 and from there by the sign bit: float32 to uint8 is not vectorised (0.11 against 0.03 ms, 64 x 3072).
        values[slab] = rounded.to(torch.int8).bitwise_xor_(-ZERO_POINT).view(torch.uint8)
        torch.mul(largest, 1 / LARGEST, out=scales[slab])
    return QuantisedRows(values, scales)
