"""RMSNorm."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise in float32, round to the model dtype, multiply by the weight, round again."""
    wide = x.float()
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    normalised = (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)
    return (normalised.float() * weight.float()).to(x.dtype)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x` in place, then `rms_norm(residual)`."""
    residual.copy_((residual.float() + x.float()).to(residual.dtype))
    return rms_norm(residual, weight, eps)
