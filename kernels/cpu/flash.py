"""PyTorch's CPU flash attention, which unlike `scaled_dot_product_attention` also returns the log-sum-exp."""

from __future__ import annotations

import torch


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense, equally long sequences.

    q [B, Hq, Q, D], k and v [B, Hkv, S, D] with Hq a multiple of Hkv, any strides but that of D;
    causal: query j sees keys 0 .. j (so Q == S is meant); mask: added to the scores, [B, 1, 1, S] float32.
    -> output [B, Hq, Q, D] (dtype of q; float32 for float16), log-sum-exp [B, Hq, Q] float32.
    """
    if q.dtype is torch.float16:
        q, k, v = q.float(), k.float(), v.float()
    if mask is not None:
        mask = mask.to(q.dtype)  # the operator insists on the query's dtype; 0 and -inf are exact in all
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return result
