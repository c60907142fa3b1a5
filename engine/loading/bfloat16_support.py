"""Whether this CPU computes in bfloat16."""

from __future__ import annotations

import platform

import torch

X86 = frozenset({"x86_64", "amd64"})


def computes_bfloat16() -> bool:
    """Whether bfloat16 products are instructions of this CPU.

    On x86 `_is_mkldnn_bf16_supported` asks for AVX-512 alone, and oneDNN then emulates them: 40 GFLOP/s against 150 to
    230 in float32 (2 cores of a Cascade Lake). Elsewhere it asks for the instructions themselves.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in X86:
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
