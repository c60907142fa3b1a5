from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from kernels import cpu, reference
from tests.support.assert_close import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (3, 80), (17, 1000), (5, 7, 128)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_agrees_with_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype) * 3, random(shape[-1], dtype=dtype, seed=1)
    assert_close(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("module", [Qwen3RMSNorm, LlamaRMSNorm])
def test_rms_norm_is_transformers_bit_for_bit(module: type[torch.nn.Module], dtype: torch.dtype) -> None:
    x, weight = random(9, 200, dtype=dtype), random(200, dtype=dtype, seed=1)
    norm = module(200, eps=1e-5).to(dtype)
    norm.load_state_dict({"weight": weight})
    assert torch.equal(cpu.rms_norm(x, weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_fused_add_rms_norm_agrees_and_updates_the_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    residual, expected_residual = (random(*shape, dtype=dtype, seed=2) for _ in range(2))
    before = x.clone()
    expected = reference.fused_add_rms_norm(x, expected_residual, weight, 1e-6)
    assert_close(cpu.fused_add_rms_norm(x, residual, weight, 1e-6), expected)
    assert_close(residual, expected_residual, max_steps=0, rms_steps=0)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 130), (17, 1000)])
def test_silu_and_mul_agrees_with_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = random(*shape, dtype=dtype) * 4
    before = gate_up.clone()
    assert_close(cpu.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 64), (5, 33, 80), (70, 7, 300)])
def test_linear_agrees_with_the_reference(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1)
    assert_close(cpu.linear(x, cpu.pack(weight)), reference.linear(x, reference.pack(weight)))


def test_a_float16_weight_is_converted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.dense.FLOAT16_CHUNK_ELEMENTS", 1000)
    x, weight = random(3, 300, dtype=torch.float16), random(31, 300, dtype=torch.float16, seed=1)
    assert_close(cpu.linear(x, cpu.pack(weight)), reference.linear(x, reference.pack(weight)))


def test_no_tokens_are_no_work() -> None:
    empty, weight = torch.empty(0, 64), torch.ones(32, 64)
    assert cpu.linear(empty, cpu.pack(weight)).shape == (0, 32)
    assert cpu.rms_norm(empty, torch.ones(64), 1e-6).shape == (0, 64)
    assert cpu.silu_and_mul(empty).shape == (0, 32)
