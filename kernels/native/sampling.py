"""Chooses tokens by the native kernels: the most likely, and one drawn."""

from __future__ import annotations

from ctypes import byref

import torch

from kernels.native.library import ArgmaxArgs, DrawArgs, Kernels, pointer

Tensor = torch.Tensor


def most_likely(kernels: Kernels, logits: Tensor, is_known: Tensor | None) -> Tensor:
    """What `Operations.choose_tokens` answers where all temperatures are 0.

    logits [N, V], float32 or bfloat16, a row's side by side; is_known [V], contiguous; None: all tokens are.
    """
    ids = torch.empty(2, logits.shape[0], dtype=torch.int64)
    args = ArgmaxArgs(
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        rows=logits.shape[0],
        width=logits.shape[1],
        is_known=pointer(is_known),
        ids=ids.data_ptr(),
        is_float=logits.dtype is torch.float32,
    )
    kernels.argmax(byref(args))
    return ids


def draw(
    kernels: Kernels,
    logits: Tensor,
    is_known: Tensor | None,
    draws: tuple[Tensor | None, Tensor, Tensor],
    ids: Tensor,
) -> None:
    """Replace what `most_likely` found in sound rows that have a draw.

    draws: temperatures [N] float32, None: 1 for all, and the largest logit is not taken off; seeds and positions [N]
    int64. ids: as `most_likely` answered them.
    """
    temperatures, seeds, positions = (None if each is None else each.contiguous() for each in draws)
    args = DrawArgs(
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        rows=logits.shape[0],
        width=logits.shape[1],
        is_known=pointer(is_known),
        temperatures=pointer(temperatures),
        seeds=pointer(seeds),
        positions=pointer(positions),
        ids=ids.data_ptr(),
        is_float=logits.dtype is torch.float32,
    )
    kernels.draw(byref(args))
