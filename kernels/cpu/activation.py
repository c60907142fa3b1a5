"""The gated activation of a feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of gate_up [T, 2I] -> [T, I]; silu is rounded to the model dtype first, as in transformers."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
