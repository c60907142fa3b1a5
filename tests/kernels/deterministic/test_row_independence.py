"""Each row's results depend on that row alone, in what `kernels.deterministic` takes from `kernels.cpu` too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import cpu, deterministic, reference
from kernels.operands import RoutedExperts, Truncation
from tests.support.tensors import assert_close, randn

DTYPES = [torch.float32, torch.bfloat16]
NUM_ROWS = 999  # with 333 columns above what PyTorch leaves to one thread, and neither a multiple of a vector

pytestmark = pytest.mark.usefixtures("num_threads")


def check_rows(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """The result of all rows together is that of one alone and of a few together, bit for bit."""
    together = run(x.clone())
    parts = torch.cat([run(rows.clone()) for rows in torch.split(x, 37)])
    assert torch.equal(together, parts), f"{int((together != parts).sum())} values differ"
    # Alone: every seventh, and those around the middle, where two threads part.
    middle = len(x) // 2
    indices = sorted({*range(0, len(x), 7), *range(max(middle - 20, 0), min(middle + 20, len(x)))})
    alone = torch.cat([run(x[index : index + 1].clone()) for index in indices])
    assert torch.equal(together[indices], alone), f"{int((together[indices] != alone).sum())} values differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 333])
def test_norms(width: int, dtype: torch.dtype) -> None:
    weight = randn(width, dtype=dtype, seed=1)
    check_rows(lambda x: deterministic.rms_norm(x, weight, 1e-6), randn(NUM_ROWS, width, dtype=dtype))
    check_rows(
        lambda x: deterministic.fused_add_rms_norm(x, x.clone(), weight, 1e-6), randn(NUM_ROWS, width, dtype=dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 333, 20_001])
def test_gated_activations(width: int, dtype: torch.dtype) -> None:
    num_rows = NUM_ROWS if width < 1000 else 5
    gate_up = randn(num_rows, 2 * width, dtype=dtype)
    for name in ("silu_and_mul", "gelu_and_mul"):
        check_rows(getattr(deterministic, name), gate_up)
        assert_close(getattr(deterministic, name)(gate_up), getattr(reference, name)(gate_up))
    check_rows(lambda rows: deterministic.clamped_swiglu(rows, 1.7, 3.0), gate_up)
    assert_close(deterministic.clamped_swiglu(gate_up, 1.7, 3.0), reference.clamped_swiglu(gate_up, 1.7, 3.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_and_the_stored_keys(dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = 6, 2, 20
    qkv = randn(NUM_ROWS, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    norm = (randn(head_dim, dtype=dtype, seed=1), randn(head_dim, dtype=dtype, seed=2), 1e-6)
    cos_sin, positions = randn(64, head_dim, seed=3), torch.arange(NUM_ROWS) % 64

    def run(indices: torch.Tensor) -> torch.Tensor:
        k_cache, v_cache = (torch.zeros(len(indices), 1, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        slots = torch.arange(len(indices))
        rows = indices.long()
        q = deterministic.qk_norm_rope_store_kv(qkv[rows], norm, cos_sin, positions[rows], k_cache, v_cache, slots)
        return torch.cat([q, k_cache[:, 0], v_cache[:, 0]], dim=1)

    check_rows(run, torch.arange(NUM_ROWS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 5), (128, 8), (40, 33)])
def test_routing(num_experts: int, top_k: int, dtype: torch.dtype) -> None:
    logits = randn(NUM_ROWS, num_experts, dtype=dtype)
    for renormalise in (False, True):
        # B023: the lambda is called in its own iteration.
        check_rows(lambda x: deterministic.route_topk(x, top_k, renormalise=renormalise).weights, logits)  # noqa: B023
        actual = deterministic.route_topk(logits[:20], top_k, renormalise=renormalise)
        expected = reference.route_topk(logits[:20], top_k, renormalise=renormalise)
        assert_close(actual.weights, expected.weights)
        assert_close(actual.expert_ids, expected.expert_ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_combining_experts(dtype: torch.dtype) -> None:
    weights = torch.rand(NUM_ROWS, 3, generator=torch.Generator().manual_seed(1))
    expert_ids = torch.randint(0, 7, (NUM_ROWS, 3), generator=torch.Generator().manual_seed(2))
    outputs = randn(NUM_ROWS, 3, 333, dtype=dtype)

    def run(indices: torch.Tensor) -> torch.Tensor:
        routed = RoutedExperts(weights[indices], expert_ids[indices])
        layout = deterministic.sort_tokens_by_expert(routed.expert_ids, 7)
        rows = outputs[indices].flatten(0, 1)[layout.pair_ids]
        return deterministic.combine_experts(rows, layout, routed.weights)

    check_rows(run, torch.arange(NUM_ROWS))


def test_sampling() -> None:
    logits = randn(60, 3001) * 3
    rows = torch.arange(60)
    top_k, top_p, min_p = 20 + rows, 0.5 + rows / 200, torch.full((60,), 0.01)

    def run(indices: torch.Tensor) -> torch.Tensor:
        draws = (torch.ones(3001, dtype=torch.bool), torch.ones(len(indices)), 7 * indices, 3 * indices)
        limits = Truncation(top_k[indices], top_p[indices], min_p[indices])
        drawn = deterministic.choose_tokens(logits[indices], *draws, limits)
        masked = logits[indices]
        cpu.sampling.mask_top_k_top_p_min_p(masked, *limits)
        return torch.cat([masked, drawn.T, torch.log_softmax(logits[indices], -1)], dim=1)

    check_rows(run, rows)
