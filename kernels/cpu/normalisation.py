"""RMSNorm."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, rounded where transformers rounds: once before the weight, once after."""
    wide = x.float()
    inverse_rms = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return torch.mul(wide, inverse_rms).to(x.dtype).mul_(weight)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x` in place, rounded to the model dtype, then `rms_norm(residual)`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)
