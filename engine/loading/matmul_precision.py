"""How exactly cuBLAS adds up."""

from __future__ import annotations

import torch


def require_float32_sums() -> None:
    """Have cuBLAS keep float32 sums in every matrix product of this process, as `Operations.linear` promises.

    PyTorch allows it to add the partial sums of a split product in bfloat16 or float16 (both on by default), and TF32
    for float32 (off by default). The switches are the process's: whoever loads a model owns it.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_tf32 = False
