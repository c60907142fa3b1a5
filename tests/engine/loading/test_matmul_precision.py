from __future__ import annotations

import torch

from engine.models.placement import require_float32_sums


def test_no_matrix_product_may_sum_in_less_than_float32() -> None:
    matmul = torch.backends.cuda.matmul
    before = (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction)
    try:
        require_float32_sums()
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
        assert not matmul.allow_tf32
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before
