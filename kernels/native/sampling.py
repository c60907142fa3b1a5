"""Calls the native choice of tokens."""

from __future__ import annotations

from ctypes import byref

import torch

from kernels.native.library import ChooseArgs, Kernels, pointer
from kernels.operands import Truncation

Tensor = torch.Tensor


def choose(
    kernels: Kernels,
    logits: Tensor,
    is_known: Tensor,
    draws: tuple[Tensor, Tensor, Tensor],
    truncation: Truncation | None,
) -> Tensor:
    """See `Operations.choose_tokens`. logits: float32 or bfloat16; draws: temperatures, seeds and positions."""
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty(2, logits.shape[0], dtype=torch.int64)
    given = [x if x is None else x.contiguous() for x in (is_known, *draws, *(truncation or [None] * 3))]
    about = (rows.data_ptr(), rows.stride(0), *rows.shape, *map(pointer, given))
    kernels.choose(byref(ChooseArgs(*about, ids.data_ptr(), rows.dtype is torch.float32)))
    return ids
