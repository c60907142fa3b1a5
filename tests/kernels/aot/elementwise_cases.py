"""Every launch of the elementwise operations at the shapes of four models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.triton.dense import MANY_ROWS, fused_add_rms_norm, rms_norm, silu_and_mul
from kernels.triton.rope_kv_store import qk_norm_rope_store_kv

DTYPE = torch.bfloat16
ROW_COUNTS = (1, MANY_ROWS - 1, MANY_ROWS)  # one on each side of the only branch
BLOCK_SIZE = 16


@dataclass(frozen=True)
class _Model:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    qk_norm: bool
    head_dim: int = 128


_MODELS = {
    "Qwen3-0.6B": _Model(1024, 3072, 16, 8, True),
    "Qwen3-8B": _Model(4096, 12288, 32, 8, True),
    "Qwen3-30B-A3B": _Model(2048, 768, 32, 4, True),
    "Llama-3-8B": _Model(4096, 14336, 32, 8, False),
}
# Head sizes that none of them has, and hidden sizes that are no powers of two.
_OTHERS = [_Model(1000, 1000, 4, 4, True, d) for d in (64, 80)] + [
    _Model(5120, 17408, 7, 1, True, d) for d in (96, 256)
]


def run_cases() -> None:
    """Call the operations with tensors that nobody reads or writes."""
    for model in (*_MODELS.values(), *_OTHERS):
        weight = torch.empty(model.hidden_size, dtype=DTYPE)
        for num_rows in ROW_COUNTS:
            x = torch.empty(num_rows, model.hidden_size, dtype=DTYPE)
            rms_norm(x, weight, 1e-6)
            fused_add_rms_norm(x, torch.empty_like(x), weight, 1e-6)
            silu_and_mul(torch.empty(num_rows, 2 * model.intermediate_size, dtype=DTYPE))
        for num_tokens in (1, 2048):
            _store(model, num_tokens)


def _store(model: _Model, num_tokens: int) -> None:
    cache = torch.empty(8, BLOCK_SIZE, model.num_kv_heads, model.head_dim, dtype=DTYPE)
    norm = torch.empty(model.head_dim, dtype=DTYPE)
    qk_norm_rope_store_kv(
        torch.empty(num_tokens, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim, dtype=DTYPE),
        (norm, norm, 1e-6) if model.qk_norm else None,
        torch.empty(40960, model.head_dim),
        torch.empty(num_tokens, dtype=torch.int64),
        cache,
        torch.empty_like(cache),
        torch.empty(num_tokens, dtype=torch.int64),
    )
