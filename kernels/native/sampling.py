"""Calls the native choice of tokens and the native truncation of rows."""

from __future__ import annotations

from ctypes import byref

import torch

from kernels.native.library import ChooseArgs, Kernels, TruncateArgs, pointer
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


def truncate(kernels: Kernels, logits: Tensor, truncation: Truncation) -> None:
    """In place: -inf for what is dropped of logits [N, V] float32; for tests and inspection.

    Rows that hold a NaN or +inf, or -inf alone, stay as they are. Raises ValueError for logits that are not float32, or
    whose rows are not contiguous.
    """
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {logits.dtype} with strides {logits.stride()}; accepted: float32, a last stride of 1"
        )
    limits = [x.contiguous() for x in truncation]
    kernels.truncate(byref(TruncateArgs(logits.data_ptr(), logits.stride(0), *logits.shape, *map(pointer, limits))))
