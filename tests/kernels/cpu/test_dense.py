"""Norms, gates, products and the rotary embedding on a CPU agree with the reference."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from kernels import cpu, deterministic, reference
from kernels.interface import Operations
from kernels.operands import PackedWeight
from tests.support.tensors import assert_close, randn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (3, 80), (17, 1000), (5, 7, 128)]

BLOCK_SIZE = 8
NUM_BLOCKS = 6
EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_agrees_with_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype) * 3, randn(shape[-1], dtype=dtype, seed=1)
    assert_close(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("module", [Qwen3RMSNorm, LlamaRMSNorm])
def test_rms_norm_is_transformers_bit_for_bit(module: type[torch.nn.Module], dtype: torch.dtype) -> None:
    x, weight = randn(9, 200, dtype=dtype), randn(200, dtype=dtype, seed=1)
    norm = module(200, eps=1e-5).to(dtype)
    norm.load_state_dict({"weight": weight})
    assert torch.equal(cpu.rms_norm(x, weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_fused_add_rms_norm_agrees_and_updates_the_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    residual, expected_residual = (randn(*shape, dtype=dtype, seed=2) for _ in range(2))
    before = x.clone()
    expected = reference.fused_add_rms_norm(x, expected_residual, weight, 1e-6)
    assert_close(cpu.fused_add_rms_norm(x, residual, weight, 1e-6), expected)
    assert_close(residual, expected_residual, max_steps=0, rms_steps=0)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 130), (17, 1000)])
def test_gated_activations_agree_with_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = randn(*shape, dtype=dtype) * 4
    before = gate_up.clone()
    assert_close(cpu.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    assert_close(cpu.gelu_and_mul(gate_up), reference.gelu_and_mul(gate_up))
    assert_close(cpu.clamped_swiglu(gate_up, 1.7, 3.0), reference.clamped_swiglu(gate_up, 1.7, 3.0))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("ops", [cpu, deterministic])
def test_logits_are_capped_in_place(ops: Operations, cap: float, dtype: torch.dtype) -> None:
    logits, expected = (randn(3, 1001, dtype=dtype) * 20 for _ in range(2))
    reference.cap_logits(expected, cap)
    ops.cap_logits(logits, cap)
    assert_close(logits, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 64), (5, 33, 80), (70, 7, 300)])
def test_linear_agrees_with_the_reference(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1)
    assert_close(cpu.linear(x, cpu.pack(weight)), reference.linear(x, reference.pack(weight)))


def test_a_float16_weight_is_converted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.dense.FLOAT16_CHUNK_ELEMENTS", 1000)
    x, weight = randn(3, 300, dtype=torch.float16), randn(31, 300, dtype=torch.float16, seed=1)
    assert_close(cpu.linear(x, cpu.pack(weight)), reference.linear(x, reference.pack(weight)))


def test_no_tokens_are_no_work() -> None:
    empty, weight = torch.empty(0, 64), torch.ones(32, 64)
    assert cpu.linear(empty, cpu.pack(weight)).shape == (0, 32)
    assert cpu.rms_norm(empty, torch.ones(64), 1e-6).shape == (0, 64)
    assert cpu.silu_and_mul(empty).shape == (0, 32)


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


@pytest.mark.parametrize("num_experts", [1, 3])
def test_the_matrices_of_an_unchanged_weight_are_views_made_once(num_experts: int) -> None:
    weight = torch.randn(num_experts, 5, 4)
    packed = PackedWeight.unchanged(weight)
    assert [matrix.data_ptr() for matrix in packed.matrices] == [matrix.data_ptr() for matrix in weight]
    assert [matrix.shape for matrix in packed.matrices] == [(5, 4)] * num_experts
    assert packed.matrices is packed.matrices
    assert packed.nbytes == weight.nbytes


@pytest.mark.parametrize("num_experts", [1, 3])
def test_the_matrices_of_experts_packed_one_by_one_are_their_parts(num_experts: int) -> None:
    packed = cpu.pack(torch.randn(num_experts, 5, 4).bfloat16())
    assert packed.matrices is packed.parts
    assert len(packed.matrices) == num_experts


def test_matrices_of_several_parts_are_refused() -> None:
    scaled = PackedWeight((torch.ones(5, 4), torch.ones(5)) * 3, (3, 5, 4))
    with pytest.raises(ValueError, match="unpack"):
        _ = scaled.matrices
