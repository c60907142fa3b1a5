"""Matrix products with a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

# A float16 weight is converted this many elements at a time: 8 MiB of float32, which stay in cache.
FLOAT16_CHUNK_ELEMENTS = 1 << 21


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `Operations.linear`."""
    if x.dtype is torch.float16:
        return linear_into(x, weight, x.new_empty(x.shape[0], weight.shape[0]))
    return F.linear(x, weight)


def linear_into(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`linear`, written to out [T, N] and returned."""
    if x.dtype is not torch.float16:
        return torch.mm(x, weight.t(), out=out)
    wide = x.float()
    rows = max(FLOAT16_CHUNK_ELEMENTS // weight.shape[1], 1)
    for start in range(0, weight.shape[0], rows):
        out[:, start : start + rows] = wide @ weight[start : start + rows].float().t()
    return out
