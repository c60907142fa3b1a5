"""Matrix products with a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from kernels.packed_weight import PackedWeight


def pack(weight: torch.Tensor, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. The tensor itself: cuBLASLt and the Triton kernels read it as it lies in any dtype."""
    return PackedWeight.unchanged(weight)


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """See `Operations.linear`. One call of cuBLASLt through PyTorch, not a Triton kernel.

    The weight is dense, nothing is gathered and nothing is fused, so a kernel of ours could only win by being a better
    GEMM. cuBLASLt reaches 790 TFLOP/s on an H200 at 8192^3 in bfloat16, Triton's persistent TMA GEMMs come near and not
    past it, and at up to 64 tokens both are bound by reading the weight. Queries, keys and values are one product, gate
    and up another, so that small models launch few of them.

    Sums are float32 as the interface asks only where
    `torch.backends.cuda.matmul.allow_{bf16,fp16}_reduced_precision_reduction` and `allow_tf32` are off; PyTorch has the
    first two on. They are the process's, so who loads the model sets them.
    """
    return F.linear(x, weight.tensor)
