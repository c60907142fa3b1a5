from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from kernels import cpu, reference
from tests.support.assert_close import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK_SIZE = 8
NUM_BLOCKS = 6
EPS = 1e-6


class Case:
    def __init__(self, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = torch.randn(num_tokens, width, generator=generator).to(dtype)
        angles = torch.arange(50)[:, None] * 0.1 ** torch.linspace(0, 3, head_dim // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.positions = torch.randint(50, (num_tokens,), generator=generator)
        self.slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens]
        self.norm = tuple((1 + 0.2 * torch.randn(head_dim, generator=generator)).to(dtype) for _ in range(2))
        self.cache_shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)

    def run(self, operations: object, *, normed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k_cache, v_cache = (torch.full(self.cache_shape, 7.0, dtype=self.qkv.dtype) for _ in range(2))
        qk_norm = (self.norm[0], self.norm[1], EPS) if normed else None
        store = operations.qk_norm_rope_store_kv  # type: ignore[attr-defined]  # a Protocol
        q = store(self.qkv, qk_norm, self.cos_sin, self.positions, k_cache, v_cache, self.slots)
        return q, k_cache, v_cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"), [(1, 4, 4, 64), (7, 8, 2, 80), (19, 7, 1, 128)]
)
def test_queries_keys_and_values_agree_with_the_reference(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    case = Case(num_tokens, num_heads, num_kv_heads, head_dim, dtype)
    for actual, expected in zip(case.run(cpu, normed=normed), case.run(reference, normed=normed), strict=True):
        assert actual.is_contiguous()
        assert_close(actual, expected)


def test_float32_is_transformers_bit_for_bit() -> None:
    case = Case(11, 4, 2, 64, torch.float32)
    q, k_cache, v_cache = case.run(cpu, normed=True)
    heads = case.qkv.view(11, -1, 64)
    normed = []
    for weight, part in zip(case.norm, (heads[:, :4], heads[:, 4:6]), strict=True):
        norm = Qwen3RMSNorm(64, eps=EPS)
        norm.load_state_dict({"weight": weight})
        normed.append(norm(part))
    cos, sin = (half.repeat(1, 2) for half in case.cos_sin[case.positions].chunk(2, dim=-1))
    expected_q, expected_k = apply_rotary_pos_emb(*normed, cos, sin)
    assert torch.equal(q, expected_q)
    assert torch.equal(k_cache.flatten(0, 1)[case.slots], expected_k)
    assert torch.equal(v_cache.flatten(0, 1)[case.slots], heads[:, 6:])


@pytest.mark.parametrize("operations", [cpu, reference])
def test_a_negative_slot_writes_nothing_and_other_slots_stay_as_they_were(operations: object) -> None:
    case = Case(9, 4, 2, 64, torch.float32)
    all_written = case.run(operations, normed=True)
    case.slots[3] = case.slots[6] = -1
    q, k_cache, v_cache = case.run(operations, normed=True)
    assert torch.equal(q, all_written[0])
    kept = case.slots[case.slots >= 0]
    for cache, full in ((k_cache, all_written[1]), (v_cache, all_written[2])):
        assert torch.equal(cache.flatten(0, 1)[kept], full.flatten(0, 1)[kept])
        untouched = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
        untouched[kept] = False
        assert (cache.flatten(0, 1)[untouched] == 7).all()


def test_the_packed_projection_is_not_changed() -> None:
    case = Case(5, 4, 2, 64, torch.float32)
    before = case.qkv.clone()
    case.run(cpu, normed=True)
    case.run(cpu, normed=False)
    assert torch.equal(case.qkv, before)
