"""Products with weights of 8 bits in plain integer arithmetic: what `kernels.int8` must compute, bit for bit."""

from __future__ import annotations

import torch


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, K] -> int64 in -127 to 127 [n, K] and float32 scales [n, 1], a row's largest magnitude being 127."""
    largest = rows.float().abs().amax(1, keepdim=True)
    integers = torch.where(largest > 0, rows.float() * (127 / largest), 0.0).round().long()
    return integers, largest * (1 / 127)


def rounded_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> int64 [N, K] and float32 scales [N, 1], by division."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return torch.where(scales > 0, weight.float() / scales, 0.0).round().long(), scales


def int8_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N] in x's dtype: one integer sum, two scales, one rounding to the dtype."""
    x_integers, x_scales = rounded(x)
    integers, scales = rounded_weight(weight)
    return ((x_integers @ integers.T).float() * scales.T * x_scales).to(x.dtype)
