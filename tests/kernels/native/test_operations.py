"""Every variant of the native kernels that this machine runs agrees with the reference, over odd shapes and views."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels import cpu, reference
from kernels.interface import KernelsUnavailable, Operations
from kernels.native import library
from kernels.native.operations import NativeOperations, native_operations
from kernels.operands import HUGE_PAGE_BYTES, ExpertLayout, RoutedExperts, Truncation
from tests.support.tensors import (
    assert_close,
    equal_scores,
    in_poison,
    native_variants,
    needs_native,
    randn,
    truncated_natively,
)

pytestmark = needs_native

DTYPES = [torch.float32, torch.bfloat16]
PRODUCT_VARIANTS = [name for name in native_variants() if name in ("avx512_bf16", "amx", "amx_emulated")]
EPS = 1e-6
QKV_SHAPES = [(1, 1, 1), (7, 8, 1), (19, 6, 2), (70, 4, 4)]


@pytest.fixture(params=native_variants())
def ops(request: pytest.FixtureRequest) -> NativeOperations:
    """Each variant in turn."""
    return native_operations(request.param)


@pytest.fixture(params=PRODUCT_VARIANTS)
def products(request: pytest.FixtureRequest) -> Operations:
    """Each variant whose products of bfloat16 are native."""
    return native_operations(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (3, 80), (17, 1000), (0, 64), (4096, 33), (5, 7, 96)])
def test_rms_norm_agrees_with_the_reference(ops: Operations, shape: Sequence[int], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype) * 3, randn(shape[-1], dtype=dtype, seed=1)
    given = in_poison(x) if x.dim() == 2 else x
    actual = ops.rms_norm(given, weight, EPS)
    assert actual.is_contiguous()
    assert_close(actual, reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 80), (17, 1000), (0, 64), (4096, 33)])
def test_fused_add_rms_norm_agrees_and_updates_the_residual(
    ops: Operations, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    expected_residual = randn(*shape, dtype=dtype, seed=2)
    residual, given = in_poison(expected_residual), in_poison(x)
    expected = reference.fused_add_rms_norm(x, expected_residual, weight, EPS)
    assert_close(ops.fused_add_rms_norm(given, residual, weight, EPS), expected)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(given, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 130), (17, 1000), (0, 64), (40, 2048), (4096, 66)])
def test_silu_and_mul_agrees_with_the_reference(ops: Operations, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = randn(*shape, dtype=dtype) * 4
    assert_close(ops.silu_and_mul(in_poison(gate_up)), reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_extreme_and_missing_values_is_the_references(ops: Operations, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e30, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e30, torch.nan]]).to(dtype)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    # Below -87 the true value is a subnormal or 0: an absolute bound.
    actual, expected = ops.silu_and_mul(gate_up).float(), reference.silu_and_mul(gate_up).float()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.allclose(actual[:, 1:-1], expected[:, 1:-1], rtol=1e-2, atol=1e-30)
    assert actual[0, 0].abs() <= 1e-7  # of -1e30: nothing is left of it beside a weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [
        *((*shape, head_dim) for shape in QKV_SHAPES for head_dim in (2, 40, 64, 80, 96, 128, 200, 256)),
        *((0, 2, 1, 40), (4096, 2, 1, 40)),
    ],
)
def test_queries_keys_and_values_agree_with_the_reference(
    ops: Operations, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    blocks, block_size = num_tokens // 8 + 4, 8
    generator = torch.Generator().manual_seed(num_tokens)
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = torch.arange(50)[:, None] * 0.1 ** torch.linspace(0, 3, head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(50, (num_tokens,), generator=generator)
    slots = torch.randperm(blocks * block_size, generator=generator)[:num_tokens]
    slots[num_tokens // 2 :: 7] = -1
    weights = [randn(head_dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    qk_norm = (weights[0], weights[1], EPS) if normed else None
    results = []
    for operations, given in ((ops, in_poison(qkv)), (reference, qkv)):
        keys, values = (torch.full((blocks, block_size, num_kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2))
        queries = operations.qk_norm_rope_store_kv(given, qk_norm, cos_sin, positions, keys, values, slots)
        results.append((queries, keys, values))
    for actual, expected in zip(*results, strict=True):
        assert actual.is_contiguous()
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 8, 2), (13, 5, 3), (6, 128, 8), (33, 4, 4), (0, 8, 2), (40, 200, 1), (4096, 9, 2)],
)
def test_routing_agrees_with_the_reference(
    ops: Operations, num_tokens: int, num_experts: int, top_k: int, renormalise: bool, dtype: torch.dtype
) -> None:
    logits = randn(num_tokens, num_experts, dtype=dtype, seed=3)
    actual = ops.route_topk(in_poison(logits), top_k, renormalise=renormalise)
    expected = reference.route_topk(logits, top_k, renormalise=renormalise)
    assert_close(actual.expert_ids, expected.expert_ids)
    assert_close(actual.weights, expected.weights)
    weights, layout = ops.route_and_sort(in_poison(logits), top_k, renormalise=renormalise)
    ordered = reference.sort_tokens_by_expert(expected.expert_ids, num_experts)
    assert torch.equal(weights, actual.weights)
    assert layout.pair_ids.tolist() == ordered.pair_ids.tolist()
    assert layout.expert_offsets.tolist() == ordered.expert_offsets.tolist()
    values = randn(num_tokens * top_k, 8, dtype=dtype)
    assert torch.equal(ops.combine_experts(values, layout, weights), ops.combine_experts(values, ordered, weights))


def test_ties_go_to_the_lower_expert_and_a_nan_shows(ops: Operations) -> None:
    logits = torch.zeros(4, 16)
    logits[1, [5, 9, 14]] = 1.0
    logits[2, 6] = torch.nan
    logits[3, 6] = torch.inf
    routed = ops.route_topk(logits, 5, renormalise=True)
    assert routed.expert_ids.tolist() == [[0, 1, 2, 3, 4], [5, 9, 14, 0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert routed.weights[:2].isfinite().all()
    assert routed.weights[2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 33, 1024, 1025, 4097, 32_768])
def test_the_lower_of_equals_is_chosen_and_nan_is_seen(ops: Operations, vocab_size: int, dtype: torch.dtype) -> None:
    logits = randn(8, vocab_size, dtype=dtype)
    logits[1] = 0.0
    logits[2] = -torch.inf
    logits[3, vocab_size // 2 :] = logits[3].max() + 1
    logits[4, vocab_size // 2] = torch.nan
    logits[5] = torch.nan
    logits[6, -1] = torch.inf
    draws = (torch.ones(vocab_size, dtype=torch.bool), torch.zeros(8), *torch.zeros(2, 8, dtype=torch.int64))
    chosen = ops.choose_tokens(in_poison(logits), *draws)
    assert chosen[0].tolist() == logits.argmax(-1).tolist()
    assert (chosen[1] < 0).tolist() == [False, False, True, False, True, True, True, False]
    assert ops.choose_tokens(logits[:0], draws[0], *(x[:0] for x in draws[1:])).shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 15, 17, 1000, 32_768])
@pytest.mark.parametrize("spread", [0.0, 1.0, 40.0, 1e4])
def test_draws_are_those_of_pytorch_to_the_bit(
    ops: Operations, spread: float, vocab_size: int, dtype: torch.dtype
) -> None:
    logits = randn(12, vocab_size, dtype=dtype, seed=vocab_size) * spread
    logits[3, 1:] = -torch.inf
    seeds, positions = torch.arange(12) * 2**33 - 5, torch.arange(12) * 2**31
    temperatures = torch.tensor([1.0, 0.7, 0.0, 1.3, 2.0, 1e-3, 0.1, 0.3, 0.9, 1e-5, 1.0, 0.5])
    is_known = torch.arange(vocab_size) % 7 != 3
    draws = (is_known, temperatures, seeds, positions)
    chosen = ops.choose_tokens(in_poison(logits), *draws)
    assert chosen.tolist() == cpu.choose_tokens(logits.float(), *draws).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 15, 17, 100, 1000, 32_768])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
def test_truncated_rows_are_those_of_pytorch(
    ops: NativeOperations, spread: float, vocab_size: int, dtype: torch.dtype
) -> None:
    """Of equal scores too. Rows of one unit each hold few values: ties at the k-th token and at the nucleus' edge."""
    logits = randn(16, vocab_size, dtype=dtype, seed=vocab_size) * spread
    logits[8:] = logits[8:].round()
    logits[3, 1::2] = -torch.inf
    logits[6, vocab_size // 3 + 1 :] = -torch.inf  # none of a whole block may be chosen
    limits = truncation_of(vocab_size)
    masked, expected = truncated_natively(ops.variant, logits.float(), limits), logits.float()
    cpu.sampling.mask_top_k_top_p_min_p(expected, *limits)
    assert_close(masked, expected, max_steps=0, rms_steps=0)
    temperatures = torch.tensor([1.0, 0.7, 0.0, 1.3, 2.0, 1e-3, 0.1, 0.3] * 2)
    is_known = torch.arange(vocab_size) % 7 != 3
    draws = (is_known, temperatures, torch.arange(16) * 2**33 - 5, torch.arange(16) * 2**31, limits)
    chosen = ops.choose_tokens(in_poison(logits), *draws)
    assert chosen.tolist() == cpu.choose_tokens(logits.float(), *draws).tolist()


def truncation_of(vocab_size: int) -> Truncation:
    """Of 16 rows: each alone, several together, and off. Of 100 or 1000 equal scores no share is a whole number."""
    top_k = [20, vocab_size, vocab_size, 50, vocab_size, 1, 700, 20_000] * 2
    top_p = [1.0, 0.9013, 1.0, 0.9507, 1.0, 0.5003, 0.8013, 0.9999]
    top_p += [1.0, 0.3003, 1e-7, 0.5003, 0.9993, 1.0, 0.9013, 0.6003]
    min_p = [0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.02, 0.0] * 2
    return Truncation(torch.tensor(top_k).clamp(max=vocab_size), torch.tensor(top_p), torch.tensor(min_p))


def test_a_best_token_whose_score_is_another_ones_may_be_dropped(ops: NativeOperations) -> None:
    """Of equal scores the first stays. Found by a search: what lay behind the row was drawn."""
    limits = Truncation(torch.tensor([2]), torch.tensor([1e-7]), torch.zeros(1))
    draws = (torch.ones(2, dtype=torch.bool), torch.tensor([1e4]), torch.tensor([3]), torch.tensor([4]), limits)
    assert ops.choose_tokens(torch.tensor([[-1.0005e-42, 7.8473e-43]]), *draws).tolist() == [[0], [0]]


def test_logits_that_are_not_finite_are_not_truncated(ops: NativeOperations) -> None:
    logits = randn(4, 40)
    logits[0, 7], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 20:] = -3e38  # the difference to the largest is finite no more
    logits[3, 0] = 3e38
    limits = Truncation(torch.full((4,), 3), torch.full((4,), 0.9), torch.zeros(4))
    masked = truncated_natively(ops.variant, logits, limits)
    assert_close(masked[:3], logits[:3], max_steps=0, rms_steps=0)
    assert (masked[3] > -torch.inf).nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("first", [0, 700])
def test_of_equal_scores_the_first_is_drawn(ops: Operations, first: int) -> None:
    logits, seed, position = equal_scores(first)
    draws = (torch.ones(2500, dtype=torch.bool), torch.ones(1), seed, position)
    assert ops.choose_tokens(logits, *draws).tolist() == [[first], [first]]


def test_logits_are_divided_by_the_temperature_and_rounded_once(ops: Operations) -> None:
    """Found by a search: a product with 1 / temperature is off by one unit in the last place, and decides otherwise."""
    seeds = torch.tensor([16, 21, 27, 29, 32, 43])
    temperatures = torch.tensor([0.9, 0.3, 1.3, 1.3, 1.3, 0.7])
    below = ("0x1.e01654p-2", "0x1.8ac3e2p-5", "0x1.315730p+0", "0x1.0f2816p+1", "0x1.055548p+2", "0x1.ce6244p-2")
    logits = torch.tensor([[0.0, -float.fromhex(text)] for text in below])
    draws = (torch.ones(2, dtype=torch.bool), temperatures, seeds, torch.zeros(6, dtype=torch.int64))
    assert ops.choose_tokens(logits, *draws)[1].tolist() == [1, 1, 0, 0, 0, 1]


def test_a_token_far_below_the_best_may_be_drawn(ops: Operations) -> None:
    """Seed, position and tokens were searched for: token 2460 draws 22.18, the most there is, and token 2 -1.83."""
    logits = torch.full((2, 2500), -60.0)
    logits[:, 2], logits[:, 2460] = 0.0, torch.tensor([-23.9, -24.1])
    draws = (torch.ones(2), torch.full((2,), 16_141_018), torch.full((2,), 7))
    assert ops.choose_tokens(logits, torch.ones(2500, dtype=torch.bool), *draws)[1].tolist() == [2460, 2]


def routed_to(num_tokens: int, num_experts: int, top_k: int) -> tuple[RoutedExperts, ExpertLayout]:
    routed = reference.route_topk(randn(num_tokens, num_experts, seed=3), top_k, renormalise=True)
    return routed, reference.sort_tokens_by_expert(routed.expert_ids, num_experts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (13, 5, 3), (6, 128, 8), (0, 4, 2), (4096, 9, 2)]
)
@pytest.mark.parametrize("width", [1, 40, 512])
def test_combining_agrees_with_the_reference(
    ops: Operations, num_tokens: int, num_experts: int, top_k: int, width: int, dtype: torch.dtype
) -> None:
    routed, layout = routed_to(num_tokens, num_experts, top_k)
    rows = randn(num_tokens * top_k, width, dtype=dtype)
    expected = reference.combine_experts(rows, layout, routed.weights)
    assert_close(ops.combine_experts(in_poison(rows), layout, routed.weights), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (0, 32, 32),
        (1, 1, 1),
        (1, 96, 64),
        (5, 33, 80),
        (9, 40, 96),
        (70, 7, 300),
        (33, 129, 1100),
        (33, 192, 1100),
        (20, 64, 2100),
        (530, 64, 40),
        (3, 1040, 1100),
    ],
)
def test_a_product_of_any_shape_agrees_with_the_reference(
    products: Operations, m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, weight = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1)
    packed, expected = products.pack(in_poison(weight)), reference.pack(weight)
    assert_close(products.linear(in_poison(x), packed), reference.linear(x, expected))
    if n % 2 == 0:
        gated = products.linear(in_poison(x), packed, gated=True)
        assert_close(gated, reference.linear(x, expected, gated=True))


@pytest.mark.slow
@pytest.mark.parametrize("m", [2048, 4096])
def test_a_product_of_many_rows_agrees_with_the_reference(products: Operations, m: int) -> None:
    x, weight = randn(m, 544, dtype=torch.bfloat16), randn(96, 544, dtype=torch.bfloat16, seed=1)
    expected = reference.linear(x, reference.pack(weight))
    assert_close(products.linear(x, products.pack(weight)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "inner"), [(72, 40), (64, 32), (33, 17)])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(0, 8, 2), (1, 8, 2), (13, 5, 3), (6, 128, 8), (70, 4, 4), (4096, 9, 2)]
)
def test_the_layer_of_experts_agrees_with_the_reference(
    products: Operations, num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    routed, layout = routed_to(num_tokens, num_experts, top_k)
    x = randn(num_tokens, hidden, dtype=dtype, seed=5)
    gate_up = (randn(num_experts, 2 * inner, hidden, seed=6) / hidden**0.5).to(dtype)
    down = (randn(num_experts, hidden, inner, seed=7) / inner**0.5).to(dtype)
    expected = reference.moe_small_batch(x, reference.pack(gate_up), reference.pack(down), routed)
    packed = products.pack(gate_up), products.pack(down)
    steps = None if dtype is torch.float32 else 8.0  # three roundings on the way, and up to 294,912 elements
    assert_close(products.moe_small_batch(in_poison(x), *packed, routed), expected, max_steps=steps)
    rows = products.grouped_gemm(in_poison(x), packed[0], layout, gather=True)
    assert_close(rows, reference.grouped_gemm(x, reference.pack(gate_up), layout, gather=True))
    gated = products.grouped_gemm(in_poison(x), packed[0], layout, gather=True, gated=True)
    assert_close(gated, reference.grouped_gemm(x, reference.pack(gate_up), layout, gather=True, gated=True))
    sorted_rows = products.grouped_gemm(in_poison(products.silu_and_mul(rows)), packed[1], layout, gather=False)
    assert_close(products.combine_experts(sorted_rows, layout, routed.weights), expected, max_steps=steps)


def test_a_large_weight_begins_with_a_huge_page(products: Operations) -> None:
    weight = products.pack(randn(3, 1040, 1100, dtype=torch.bfloat16))
    (part,) = weight.parts
    assert part.data_ptr() % HUGE_PAGE_BYTES == 0
    assert part.nbytes == 3 * 1056 * 1120 * 2  # filled up to whole tiles, and no further


@pytest.mark.parametrize("shape", [(1, 1), (33, 80), (100, 64), (40, 1101)])
def test_a_packed_weight_gives_its_rows_back(products: Operations, shape: tuple[int, int]) -> None:
    weight = randn(*shape, dtype=torch.bfloat16)
    packed = products.pack(in_poison(weight))
    if not packed.has_rows:
        pytest.skip("oneDNN's layout, which has none")
    indices = torch.cat((torch.arange(shape[0] - 1, -1, -1), torch.tensor([0, shape[0] // 2, 0])))
    assert torch.equal(packed.rows(indices), weight[indices])
    assert packed.rows(indices[:0]).shape == (0, shape[1])


def test_a_nan_stays_in_its_row_of_a_product(products: Operations) -> None:
    x, weight = randn(40, 64, dtype=torch.bfloat16), randn(32, 64, dtype=torch.bfloat16, seed=1)
    x[17, 5] = torch.nan
    result = products.linear(x, products.pack(weight))
    assert result[17].isnan().all()
    assert result[[row for row in range(40) if row != 17]].isfinite().all()


def test_rows_or_columns_that_do_not_fit_are_refused(products: Operations) -> None:
    weight = products.pack(randn(2, 32, 64, dtype=torch.bfloat16))
    _, layout = routed_to(3, 2, 1)
    with pytest.raises(ValueError, match="48 columns; accepted: 64"):
        products.grouped_gemm(randn(3, 48, dtype=torch.bfloat16), weight, layout, gather=True)
    with pytest.raises(ValueError, match="2 rows; accepted: 3"):
        products.grouped_gemm(randn(2, 64, dtype=torch.bfloat16), weight, layout, gather=False)


def test_the_result_does_not_depend_on_the_number_of_threads(ops: Operations) -> None:
    x, weight = randn(300, 512, dtype=torch.bfloat16), randn(512, dtype=torch.bfloat16, seed=1)
    num_threads = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((ops.rms_norm(x, weight, EPS), ops.linear(x, ops.pack(weight.expand(64, -1)))))
    finally:
        torch.set_num_threads(num_threads)
    for normed, product in results[1:]:
        assert torch.equal(normed, results[0][0])
        assert_close(product, results[0][1])


def test_float16_is_left_to_pytorch(ops: Operations) -> None:
    x, weight = randn(3, 80, dtype=torch.float16), randn(80, dtype=torch.float16, seed=1)
    assert torch.equal(ops.rms_norm(x, weight, EPS), cpu.rms_norm(x, weight, EPS))
    assert torch.equal(ops.silu_and_mul(x), cpu.silu_and_mul(x))


def test_the_emulated_tiles_give_what_dot_products_give(ops: Operations) -> None:
    """Small whole numbers: every sum is exact, so each bit must be the same whatever the order."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (37, 96), generator=generator).bfloat16()
    weight = torch.randint(-8, 9, (40, 96), generator=generator).bfloat16()
    expected = (x.double() @ weight.double().t()).bfloat16()
    assert torch.equal(ops.linear(x, ops.pack(weight)), expected)


@pytest.mark.parametrize("case", ["says nothing", "has another size"])
def test_a_library_of_other_sources_is_refused_before_it_is_called(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Arguments of another size are read past their end, and the process dies of it.
    path = library.LIBRARY
    if case == "says nothing":
        path = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"
    else:
        monkeypatch.setattr(library, "STRUCTURES", (*library.STRUCTURES[1:], library.GemmArgs))
    monkeypatch.setattr(library, "LIBRARY", in_other_place(path))
    with pytest.raises(KernelsUnavailable, match=r"built from other sources .*python -m kernels\.native\.build"):
        native_operations("base")


def in_other_place(path: Path) -> Path:
    """The same file by another name: a library once opened is not looked at again."""
    return path.parent / "." / ".." / path.parent.name / path.name
