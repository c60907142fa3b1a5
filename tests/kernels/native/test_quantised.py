"""Native products with quantised weights agree with the reference, in every variant that this machine runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.native.operations import NativeOperations, native_operations
from kernels.native.quantised import NativeQuantised
from kernels.operands import RoutedExperts
from kernels.quantised import PackedQuantised, QuantisedWeight, WeightScheme, pack_nibbles, quantise
from tests.support.tensors import assert_close, in_poison, native_variants, needs_native, random_quantised

pytestmark = needs_native

DTYPES = [torch.float32, torch.bfloat16]
VARIANTS = [name for name in native_variants() if name != "base"]  # whose products with them are PyTorch's
BITS8 = WeightScheme(8, is_float=False, group_size=None)
FLOAT8 = WeightScheme(8, is_float=True, group_size=None)
# name -> scheme, dtype of its scales, whether inputs are reordered
SCHEMES = {
    "int4_32": (WeightScheme(4, is_float=False, group_size=32), torch.float16, False),
    "int4_128_zeros": (WeightScheme(4, is_float=False, group_size=128, symmetric=False), torch.float16, False),
    "int4_64_order": (WeightScheme(4, is_float=False, group_size=64, symmetric=False), torch.bfloat16, True),
    "int4_channel": (WeightScheme(4, is_float=False, group_size=None), torch.float32, False),
    "int8_channel": (BITS8, torch.float32, False),
    "int8_48_zeros": (WeightScheme(8, is_float=False, group_size=48, symmetric=False), torch.bfloat16, True),
    "float8_channel": (
        WeightScheme(8, is_float=True, group_size=None, activations="float8_token"),
        torch.float32,
        False,
    ),
    "float8_blocks": (WeightScheme(8, is_float=True, group_size=128, block_rows=128), torch.bfloat16, False),
    "float8_odd_blocks": (WeightScheme(8, is_float=True, group_size=64, block_rows=24), torch.float32, False),
    "int8_activations": (
        WeightScheme(8, is_float=False, group_size=None, activations="int8_token"),
        torch.float32,
        False,
    ),
}
ROWS = [0, 1, 2, 3, 4, 5, 8, 9, 17, 70]
SHAPES = [(150, 200), (32, 64), (1, 2), (33, 34), (70, 1130), (16, 320)]  # [N, K], most no multiples of a tile


@pytest.fixture(params=VARIANTS)
def ops(request: pytest.FixtureRequest) -> NativeOperations:
    """The operations of each variant with such products."""
    return native_operations(request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_weight(name: str, lead: tuple[int, ...], rows: int, width: int) -> QuantisedWeight:
    scheme, scale_dtype, is_reordered = SCHEMES[name]
    return random_quantised(scheme, (*lead, rows, width), is_reordered=is_reordered, scale_dtype=scale_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_linear_agrees_with_the_reference(
    ops: NativeOperations, name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = random_weight(name, (), *shape)
    packed, plain = ops.pack(weight), reference.pack(weight)
    assert isinstance(packed, NativeQuantised)
    for num_rows in ROWS:
        x = random(num_rows, shape[1], dtype=dtype)
        given = in_poison(x)
        actual = ops.linear(given, packed)
        assert actual.is_contiguous()
        assert_close(actual, reference.linear(x, plain))
        assert torch.equal(given, x)
        if shape[0] % 2 == 0:
            assert_close(ops.linear(given, packed, gated=True), ops.silu_and_mul(actual))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "inner"), [(72, 40), (128, 64)])
@pytest.mark.parametrize("name", SCHEMES)
def test_experts_agree_with_the_reference(
    ops: NativeOperations, name: str, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    num_tokens, num_experts, top_k = 23, 5, 2  # the last expert has no rows
    gate_up = random_weight(name, (num_experts,), 2 * inner, hidden)
    down = random_weight(name, (num_experts,), hidden, inner)
    x = random(num_tokens, hidden, dtype=dtype)
    ids = torch.randint(0, num_experts - 1, (num_tokens, top_k), generator=torch.Generator().manual_seed(3))
    routed = RoutedExperts(torch.rand(num_tokens, top_k, generator=torch.Generator().manual_seed(4)), ids)
    layout = reference.sort_tokens_by_expert(routed.expert_ids, num_experts)
    plain, packed = (reference.pack(gate_up), reference.pack(down)), (ops.pack(gate_up), ops.pack(down))
    expected = reference.grouped_gemm(x, plain[0], layout, gather=True)
    actual = ops.grouped_gemm(in_poison(x), packed[0], layout, gather=True)
    assert_close(actual, expected)
    gated = ops.grouped_gemm(in_poison(x), packed[0], layout, gather=True, gated=True)
    assert_close(gated, ops.silu_and_mul(actual))
    rows = reference.silu_and_mul(expected)
    sorted_rows = ops.grouped_gemm(in_poison(rows), packed[1], layout, gather=False)
    # Tiles round what zero points and scales make of a value to bfloat16.
    steps = None if dtype is torch.float32 else 8.0
    assert_close(sorted_rows, reference.grouped_gemm(rows, plain[1], layout, gather=False), max_steps=steps)
    steps = steps or 64.0
    if gate_up.scheme.activations == "int8_token":
        steps = 0.12 / torch.finfo(dtype).eps  # a value between two integers may go to either
    whole = ops.moe_small_batch(in_poison(x), *packed, routed)
    assert_close(whole, reference.moe_small_batch(x, *plain, routed), max_steps=steps, rms_steps=steps / 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 64])
def test_each_value_of_each_format_is_exact(ops: NativeOperations, num_rows: int, dtype: torch.dtype) -> None:
    """One row of the weight for each value, at every place of a vector: a product with one 1 gives it back."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]  # of float8 a NaN: another test's
    for values, scheme in (
        (pack_nibbles(torch.arange(16).repeat_interleave(64).view(16, 64)), WeightScheme(4, False, None)),
        (torch.arange(-128, 128, dtype=torch.int8).repeat_interleave(64).view(-1, 64), WeightScheme(8, False, None)),
        (codes.repeat_interleave(64).view(-1, 64).view(torch.float8_e4m3fn), WeightScheme(8, True, None)),
    ):
        weight = QuantisedWeight(scheme, values, torch.ones(values.shape[0], 1))
        packed, eye = ops.pack(weight), torch.eye(64, dtype=dtype)
        expected = reference.linear(eye, reference.pack(weight))
        for start in range(0, 64, num_rows):
            rows = slice(start, start + num_rows)
            assert torch.equal(ops.linear(eye[rows], packed), expected[rows])


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_each_scale_of_half_precision_is_exact(ops: NativeOperations, scale_dtype: torch.dtype) -> None:
    """One row of the weight for each finite number, those of next to nothing too; times a value of 1."""
    scales = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(scale_dtype)
    scales = scales[scales.isfinite() & ((scales.float().abs() >= torch.finfo(torch.float32).tiny) | (scales == 0))]
    weight = QuantisedWeight(BITS8, torch.ones(len(scales), 1, dtype=torch.int8), scales.view(-1, 1))
    for num_rows in (1, 20):
        result = ops.linear(torch.ones(num_rows, 1), ops.pack(weight))
        assert torch.equal(result, scales.float().expand(num_rows, -1))


def test_sums_of_integers_are_exact(ops: NativeOperations) -> None:
    """Each row's largest magnitude is 127, so its scale is 1: the result is the sum of whole numbers itself."""
    x = torch.randint(-127, 128, (37, 4100), generator=torch.Generator().manual_seed(0)).float()
    x[:, 7] = 127
    values = torch.randint(-128, 128, (50, 4100), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    scheme = WeightScheme(8, is_float=False, group_size=None, activations="int8_token")
    packed = ops.pack(QuantisedWeight(scheme, values, torch.ones(50, 1)))
    expected = (x.long() @ values.long().T).float()
    for num_rows in (1, 5, 37):
        assert torch.equal(ops.linear(x[:num_rows], packed), expected[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4_128_zeros", "int8_channel", "int8_activations", "float8_blocks"])
def test_a_nan_stays_in_its_row(ops: NativeOperations, name: str, dtype: torch.dtype) -> None:
    packed = ops.pack(random_weight(name, (), 96, 192))
    for num_rows in (3, 40):
        x = random(num_rows, 192, dtype=dtype)
        x[1, 5] = torch.nan
        result = ops.linear(x, packed)
        assert result[1].isnan().all()
        assert result[[row for row in range(num_rows) if row != 1]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_of_float8_stays_in_its_column(ops: NativeOperations, dtype: torch.dtype) -> None:
    weight = random_weight("float8_channel", (), 40, 64)
    weight.values.view(torch.uint8)[7, 9] = 0xFF
    for num_rows in (1, 20):
        result = ops.linear(random(num_rows, 64, dtype=dtype), ops.pack(weight))
        assert result[:, 7].isnan().all()
        assert result[:, [column for column in range(40) if column != 7]].isfinite().all()


def test_the_result_does_not_depend_on_the_number_of_threads(ops: NativeOperations) -> None:
    packed = [ops.pack(random_weight(name, (), 320, 192)) for name in SCHEMES]
    num_threads = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append([ops.linear(random(n, 192, dtype=torch.bfloat16), p) for p in packed for n in (4, 40)])
    finally:
        torch.set_num_threads(num_threads)
    for others in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], others, strict=True))


def test_a_quantised_weight_stays_packed(ops: NativeOperations) -> None:
    weight = random_weight("int4_128_zeros", (3,), 64, 256)
    assert ops.pack(weight).nbytes == 3 * 64 * (256 // 2 + 256 // 128 * (2 + 1))
    assert ops.pack(random_weight("int8_activations", (), 64, 256)).nbytes == 64 * (256 + 4 + 4)


def test_what_the_kernels_do_not_take_is_pytorchs(ops: NativeOperations) -> None:
    odd = quantise(random(40, 64), WeightScheme(4, is_float=False, group_size=8))
    grouped = quantise(random(40, 64), WeightScheme(8, is_float=False, group_size=32, activations="int8_token"))
    for weight in (odd, grouped):
        packed, x = ops.pack(weight), random(5, 64, dtype=torch.bfloat16)
        assert isinstance(packed, PackedQuantised)
        assert_close(ops.linear(x, packed), reference.linear(x, reference.pack(weight)))


def test_rows_or_columns_that_do_not_fit_are_refused(ops: NativeOperations) -> None:
    packed = ops.pack(random_weight("int4_32", (2,), 32, 64))
    layout = reference.sort_tokens_by_expert(torch.tensor([[0], [1], [1]]), 2)
    with pytest.raises(ValueError, match="48 columns; accepted: 64"):
        ops.grouped_gemm(random(3, 48), packed, layout, gather=True)
    with pytest.raises(ValueError, match="2 rows; accepted: 3"):
        ops.grouped_gemm(random(2, 64), packed, layout, gather=False)


def test_an_order_of_inputs_is_each_experts_own(ops: NativeOperations) -> None:
    weight = random_weight("int4_64_order", (2,), 32, 128)
    assert weight.input_order is not None
    same = replace(weight, input_order=weight.input_order[:1].expand(2, -1).contiguous())
    layout = reference.sort_tokens_by_expert(torch.tensor([[0], [1], [1]]), 2)
    x = random(3, 128)
    own = ops.grouped_gemm(x, ops.pack(weight), layout, gather=True)
    assert torch.equal(own[:1], ops.grouped_gemm(x, ops.pack(same), layout, gather=True)[:1])
    assert not torch.allclose(own[1:], ops.grouped_gemm(x, ops.pack(same), layout, gather=True)[1:])
