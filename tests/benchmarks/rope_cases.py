"""Query and key norm, rotary embedding and the write into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from kernels.interface import Operations
from tests.benchmarks.case import Case, Prepare, Workload
from tests.benchmarks.elementwise_cases import ELEMENTWISE_GOAL_PERCENT, EPS
from tests.benchmarks.model_shape import ModelShape, distinct
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.tensors import random, shuffled

BLOCK_SIZE = 16
MAX_POSITIONS = 40960


def rope_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Tokens of one prompt, or of as many requests, whose slots lie anywhere."""
    for num_tokens, goal in ((sizes.few_tokens, None), (sizes.many_tokens, ELEMENTWISE_GOAL_PERCENT)):
        for names, model in distinct(models, lambda m: (m.num_heads, m.num_kv_heads, m.head_dim, m.qk_norm)):
            norm = "norm" if model.qk_norm else "no norm"
            shape = f"T {num_tokens}, {model.num_heads}/{model.num_kv_heads} x {model.head_dim}, {norm}"
            yield Case("qk_norm_rope_store_kv", names, shape, "bandwidth", _rope(ops, num_tokens, model), goal)


def _rope(ops: Operations, num_tokens: int, model: ModelShape) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        qkv = random(num_tokens, model.qkv_width, device=device)
        weights = random(2, model.head_dim, device=device)
        norm = (weights[0], weights[1], EPS) if model.qk_norm else None
        cos_sin = random(MAX_POSITIONS, model.head_dim, device=device, dtype=torch.float32)
        positions = shuffled(MAX_POSITIONS, device)[:num_tokens]
        num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
        caches = torch.zeros(
            2, num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim, dtype=qkv.dtype, device=device
        )
        slots = shuffled(num_blocks * BLOCK_SIZE, device)[:num_tokens]
        return Workload(
            # Read and written: each head once. Read besides: cosines and sines in float32, position and slot.
            num_tokens * (2 * 2 * model.qkv_width + 4 * model.head_dim + 16),
            "T (2 x 2 (Hq + 2 Hkv) D + 4 D + 16) bytes",
            lambda: ops.qk_norm_rope_store_kv(qkv, norm, cos_sin, positions, caches[0], caches[1], slots),
            {"torch rms_norm, rotation, index_copy_": lambda: _by_torch(qkv, norm, cos_sin[positions], caches, slots)},
        )

    return prepare


def _by_torch(
    qkv: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    rotation: torch.Tensor,
    caches: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    num_kv_heads, head_dim = caches.shape[-2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    queries, keys, values = torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), dim=1)
    if norm is not None:
        queries = F.rms_norm(queries, (head_dim,), norm[0], norm[2])
        keys = F.rms_norm(keys, (head_dim,), norm[1], norm[2])
    cos, sin = rotation[:, None].chunk(2, dim=-1)
    caches[0].flatten(0, 1).index_copy_(0, slots, _rotate(keys, cos, sin))
    caches[1].flatten(0, 1).index_copy_(0, slots, values)
    return _rotate(queries, cos, sin)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
