"""The gated activation of a feed-forward layer, never cut within a row."""

from __future__ import annotations

import torch

from kernels.cpu import activation as cpu

# PyTorch cuts larger element-wise work between threads, at any element, and what is left of a cut after whole vectors
# is computed by another exp: one row of 999 had other bits with two threads.
MAX_UNCUT_ELEMENTS = 32_767


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Operations.silu_and_mul`.

    As many rows at a time as PyTorch leaves to one thread; a row longer than that alone: it is always cut alike.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows = max(MAX_UNCUT_ELEMENTS // width, 1)
    if num_rows <= rows:
        return cpu.silu_and_mul(gate_up)
    out = gate_up.new_empty(num_rows, width)
    for start in range(0, num_rows, rows):
        out[start : start + rows] = cpu.silu_and_mul(gate_up[start : start + rows])
    return out
