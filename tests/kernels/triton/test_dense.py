"""Triton norms, gates and products agree with the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import reference
from kernels.triton import dense
from kernels.triton.dense import (
    cap_logits,
    clamped_swiglu,
    fused_add_rms_norm,
    gelu_and_mul,
    linear,
    rms_norm,
    silu_and_mul,
)
from kernels.triton.quantised import pack
from tests.support.devices import past_int32_storage
from tests.support.tensors import assert_close, assert_same_bits, randn

pytestmark = pytest.mark.usefixtures("guarded_memory")

EPS = 1e-6
SHAPES = [(1, 64), (3, 80), (5, 1000), (2, 4096), (2, 3, 128)]
FAR = 2**30 + 16  # a row stride whose second multiple no int32 holds


@pytest.fixture(params=[False, True], ids=["a row a program", "many rows a program"])
def many_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(dense, "MANY_ROWS", 1)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_agrees_with_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = randn(*shape, dtype=dtype, device=device) * 3
    weight = randn(shape[-1], dtype=dtype, device=device, seed=1)
    before = x.clone()
    assert_close(rms_norm(x, weight, EPS).cpu(), reference.rms_norm(x.cpu(), weight.cpu(), EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize("eps", [1e-6, 1.0])
def test_rms_norm_of_small_numbers_depends_on_eps(eps: float, device: torch.device) -> None:
    x = randn(3, 80, dtype=torch.float32, device=device) * 1e-3
    weight = randn(80, dtype=torch.float32, device=device, seed=1)
    assert_close(rms_norm(x, weight, eps).cpu(), reference.rms_norm(x.cpu(), weight.cpu(), eps))


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_fused_add_rms_norm_agrees_and_updates_the_residual_alone(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = randn(*shape, dtype=dtype, device=device), randn(shape[1], dtype=dtype, device=device, seed=1)
    # The residual lies between other rows, which stay.
    around = randn(shape[0] + 8, shape[1], dtype=dtype, device=device, seed=2)
    expected_around, x_before = around.cpu().clone(), x.clone()
    residual, expected_residual = around[4:-4], expected_around[4:-4]
    actual = fused_add_rms_norm(x, residual, weight, EPS)
    assert_close(actual.cpu(), reference.fused_add_rms_norm(x.cpu(), expected_residual, weight.cpu(), EPS))
    assert torch.equal(around.cpu(), expected_around)
    assert torch.equal(x, x_before)


def test_results_are_rounded_where_the_reference_rounds(dtype: torch.dtype, device: torch.device) -> None:
    if dtype is torch.float32:
        pytest.skip("nothing is rounded between")
    x, residual = (randn(8, 1000, dtype=dtype, device=device, seed=seed) for seed in range(2))
    weight = randn(1000, dtype=dtype, device=device, seed=2)
    expected = reference.fused_add_rms_norm(x.cpu(), residual.cpu().clone(), weight.cpu(), EPS)
    assert_same_bits(fused_add_rms_norm(x, residual, weight, EPS).cpu(), expected)
    assert_same_bits(rms_norm(x, weight, EPS).cpu(), reference.rms_norm(x.cpu(), weight.cpu(), EPS))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter's numpy, and meant
@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("shape", [(1, 2), (3, 130), (5, 1536), (3, 2000), (19, 128)])
def test_gated_activations_agree_with_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    gate_up = randn(*shape, dtype=dtype, device=device) * 4
    before = gate_up.clone()
    assert_close(silu_and_mul(gate_up).cpu(), reference.silu_and_mul(gate_up.cpu()))
    assert_close(gelu_and_mul(gate_up).cpu(), reference.gelu_and_mul(gate_up.cpu()))
    clamped = reference.clamped_swiglu(gate_up.cpu(), 1.7, 3.0)
    assert_close(clamped_swiglu(gate_up, 1.7, 3.0).cpu(), clamped)
    assert torch.equal(gate_up, before)


def test_logits_are_capped_in_place(dtype: torch.dtype, device: torch.device) -> None:
    logits = randn(3, 130, dtype=dtype, device=device) * 20
    expected = logits.cpu()
    reference.cap_logits(expected, 30.0)
    cap_logits(logits, 30.0)
    assert_close(logits.cpu(), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter's numpy, and meant
def test_silu_of_large_gates_neither_overflows_nor_becomes_nan(dtype: torch.dtype, device: torch.device) -> None:
    gate = torch.tensor([-6e4, -200.0, -88.7, -20.0, 0.0, 20.0, 200.0, torch.inf, torch.nan])
    gate_up = torch.stack((gate, torch.full_like(gate, 0.5))).view(1, -1).to(dtype).to(device)
    actual = silu_and_mul(gate_up).cpu()
    assert_close(actual, reference.silu_and_mul(gate_up.cpu()))
    assert actual[0, :8].isfinite().tolist() == [True] * 7 + [False]


def test_rows_may_lie_apart_and_columns_too(dtype: torch.dtype, device: torch.device) -> None:
    wide, weight = randn(6, 300, dtype=dtype, device=device), randn(100, dtype=dtype, device=device, seed=1)
    column_major = randn(100, 6, dtype=dtype, device=device, seed=2).t()
    for x in (wide[:, 7:107], column_major):
        expected = reference.rms_norm(x.cpu(), weight.cpu(), EPS)
        assert_close(rms_norm(x, weight, EPS).cpu(), expected)
        assert_close(silu_and_mul(x).cpu(), reference.silu_and_mul(x.cpu()))
        residual, expected_residual = wide[:, 150:250].clone(), wide[:, 150:250].cpu().clone()
        expected = reference.fused_add_rms_norm(x.cpu(), expected_residual, weight.cpu(), EPS)
        assert_close(fused_add_rms_norm(x, residual, weight, EPS).cpu(), expected)


def test_a_residual_that_lies_apart_is_updated_in_place(device: torch.device) -> None:
    wide = randn(5, 300, dtype=torch.float32, device=device)
    expected_wide, x, weight = wide.cpu().clone(), wide[:, :100].clone(), wide[0, 200:].clone()
    expected = reference.fused_add_rms_norm(x.cpu(), expected_wide[:, 100:200], weight.cpu(), EPS)
    assert_close(fused_add_rms_norm(x, wide[:, 100:200], weight, EPS).cpu(), expected)
    assert torch.equal(wide.cpu(), expected_wide)


def test_a_residual_that_cannot_be_written_in_place_is_refused(device: torch.device) -> None:
    residual = randn(100, 6, dtype=torch.float32, device=device).t()
    with pytest.raises(ValueError, match=r"residual has strides \(1, 6\)"):
        fused_add_rms_norm(residual.contiguous(), residual, residual[0].contiguous(), EPS)


def test_offsets_pass_what_an_int32_holds(tmp_path: Path, device: torch.device) -> None:
    storage = past_int32_storage(tmp_path, device)
    rows = storage.as_strided((3, 64), (FAR, 1))
    rows.copy_(randn(3, 64, dtype=torch.float16, device=device))
    near, weight = rows.cpu().clone(), randn(64, dtype=torch.float16, device=device, seed=1)
    assert_close(rms_norm(rows, weight, EPS).cpu(), reference.rms_norm(near, weight.cpu(), EPS))
    assert_close(silu_and_mul(rows).cpu(), reference.silu_and_mul(near))
    x = randn(3, 64, dtype=torch.float16, device=device, seed=2)
    expected = reference.fused_add_rms_norm(x.cpu(), near, weight.cpu(), EPS)
    assert_close(fused_add_rms_norm(x, rows, weight, EPS).cpu(), expected)
    assert torch.equal(rows.cpu(), near)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 64), (5, 33, 80), (7, 7, 300)])
def test_linear_agrees_with_the_reference(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = randn(m, k, dtype=dtype, device=device), randn(n, k, dtype=dtype, device=device, seed=1)
    assert_close(linear(x, pack(weight)).cpu(), reference.linear(x.cpu(), pack(weight.cpu())))


def test_no_rows_are_no_work(dtype: torch.dtype, device: torch.device) -> None:
    empty, weight = torch.zeros(0, 64, dtype=dtype, device=device), torch.ones(32, 64, dtype=dtype, device=device)
    assert rms_norm(empty, weight[0], EPS).shape == (0, 64)
    assert fused_add_rms_norm(empty, empty.clone(), weight[0], EPS).shape == (0, 64)
    assert silu_and_mul(empty).shape == (0, 32)
    assert linear(empty, pack(weight)).shape == (0, 32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes are for a GPU")
@pytest.mark.parametrize("hidden_size", [1024, 2048, 4096, 5120, 12288])
@pytest.mark.parametrize("num_rows", [1, 64, 8192])
def test_real_sizes_agree_with_the_reference(num_rows: int, hidden_size: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    x, residual = (randn(num_rows, hidden_size, dtype=dtype, device=device, seed=seed) for seed in range(2))
    weight = randn(hidden_size, dtype=dtype, device=device, seed=2)
    expected_residual = residual.clone()
    expected = reference.fused_add_rms_norm(x, expected_residual, weight, EPS)
    assert_close(fused_add_rms_norm(x, residual, weight, EPS), expected)
    assert torch.equal(residual, expected_residual)
    assert_close(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert_close(silu_and_mul(x), reference.silu_and_mul(x))
