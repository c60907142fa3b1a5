"""Products with quantised weights: what the form means, and that each CPU implementation computes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import cpu, deterministic, reference
from kernels.interface import Operations
from kernels.operands import RoutedExperts
from kernels.quantised import QuantisedWeight, WeightScheme, quantise
from tests.support.tensors import assert_close, random_quantised

IMPLEMENTATIONS: list[Operations] = [cpu, deterministic]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# name -> scheme, whether inputs are reordered
SCHEMES = {
    "int4": (WeightScheme(4, is_float=False, group_size=32), False),
    "int4_zeros": (WeightScheme(4, is_float=False, group_size=16, symmetric=False), False),
    "int4_channel": (WeightScheme(4, is_float=False, group_size=None), False),
    "int4_order": (WeightScheme(4, is_float=False, group_size=32, symmetric=False), True),
    "int8_zeros": (WeightScheme(8, is_float=False, group_size=64, symmetric=False), True),
    "int8_channel": (WeightScheme(8, is_float=False, group_size=None), False),
    "int8_activations": (WeightScheme(8, is_float=False, group_size=None, activations="int8_token"), False),
    # What oneDNN does not multiply: rounded all the same, on every CPU.
    "int8_activations_order": (WeightScheme(8, is_float=False, group_size=None, activations="int8_token"), True),
    "int8_activations_zeros": (WeightScheme(8, False, None, symmetric=False, activations="int8_token"), False),
    "int8_activations_groups": (WeightScheme(8, is_float=False, group_size=64, activations="int8_token"), False),
    "int8_activations_blocks": (
        WeightScheme(8, is_float=False, group_size=None, block_rows=24, activations="int8_token"),
        False,
    ),
    "float8_blocks": (WeightScheme(8, is_float=True, group_size=64, block_rows=24, activations="float8_token"), False),
    "float8_channel": (WeightScheme(8, is_float=True, group_size=None), False),
}
NUM_ROWS, WIDTH = 150, 200  # no multiple of a group or a block
NUM_EXPERTS, TOP_K = 5, 2


def random_weight(name: str, lead: tuple[int, ...] = (), rows: int = NUM_ROWS, width: int = WIDTH) -> QuantisedWeight:
    scheme, is_reordered = SCHEMES[name]
    return random_quantised(scheme, (*lead, rows, width), is_reordered=is_reordered)


def dense_of(weight: QuantisedWeight) -> torch.Tensor:
    """A matrix [N, K] float32, element by element, its inputs in the order of the activations."""
    scheme, (rows, width) = weight.scheme, weight.shape
    dense = torch.zeros(rows, width)
    for row in range(rows):
        for column in range(width):
            value = float(weight.values[row, column]) if scheme.bits == 8 else 0.0
            if scheme.bits == 4:
                value = (int(weight.values[row, column // 2]) >> 4 * (column % 2)) & 15
            block = (row // (scheme.block_rows or 1), column // (scheme.group_size or width))
            zero = 0 if scheme.bits == 8 else 8
            if weight.zero_points is not None:
                zero = int(weight.zero_points[block])
            place = column if weight.input_order is None else int(weight.input_order[column])
            dense[row, place] = (value - zero) * float(weight.scales[block])
    return dense


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    scales = x.float().abs().amax(1, keepdim=True) / 127
    return (x.float() / scales).round() * scales


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_reference_is_the_product_with_each_element_by_itself(name: str) -> None:
    x, weight = random(3, WIDTH), random_weight(name)
    taken = rounded_to_int8(x) if weight.scheme.activations == "int8_token" else x
    assert_close(reference.linear(x, reference.pack(weight)), taken @ dense_of(weight).T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_linear_agrees_with_the_reference(
    ops: Operations, name: str, num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.cpu.quantised.TILE_ELEMENTS", 48 * WIDTH)  # tiles, and a last one that is shorter
    x, weight = random(num_tokens, WIDTH, dtype=dtype), random_weight(name)
    before = x.clone()
    assert_close(ops.linear(x, ops.pack(weight)), reference.linear(x, reference.pack(weight)))
    gated = ops.linear(x, ops.pack(weight), gated=True)
    assert_close(gated, ops.silu_and_mul(ops.linear(x, ops.pack(weight))))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_experts_agree_with_the_reference(ops: Operations, name: str, dtype: torch.dtype) -> None:
    hidden, inner, num_tokens = 72, 40, 17
    gate_up = random_weight(name, (NUM_EXPERTS,), 2 * inner, hidden)
    down = random_weight(name, (NUM_EXPERTS,), hidden, inner)
    x = random(num_tokens, hidden, dtype=dtype)
    routed = RoutedExperts(
        torch.rand(num_tokens, TOP_K, generator=torch.Generator().manual_seed(2)),
        torch.arange(num_tokens * TOP_K).view(-1, TOP_K) % (NUM_EXPERTS - 1),
    )
    layout = reference.sort_tokens_by_expert(routed.expert_ids, NUM_EXPERTS)
    plain = (reference.pack(gate_up), reference.pack(down))
    packed = (ops.pack(gate_up), ops.pack(down))
    expected = reference.grouped_gemm(x, plain[0], layout, gather=True)
    assert_close(ops.grouped_gemm(x, packed[0], layout, gather=True), expected)
    rows = reference.silu_and_mul(expected)
    assert_close(
        ops.grouped_gemm(rows, packed[1], layout, gather=False),
        reference.grouped_gemm(rows, plain[1], layout, gather=False),
    )
    # Rounded once more in half precision than the reference; a value between two integers may go to either.
    steps = {torch.float32: 64.0, torch.bfloat16: 8.0, torch.float16: 8.0}[dtype]
    if gate_up.scheme.activations == "int8_token":
        steps = 0.06 / torch.finfo(dtype).eps
    actual = ops.moe_small_batch(x, *packed, routed)
    assert_close(actual, reference.moe_small_batch(x, *plain, routed), max_steps=steps, rms_steps=steps / 4)


@pytest.mark.parametrize("name", ["int4_order", "int8_zeros", "float8_tensor"])
def test_an_experts_matrix_has_the_tensors_of_that_expert(name: str) -> None:
    """Which the reference takes as its own too: in products with it an error here would be on both sides."""
    scheme, is_reordered = SCHEMES.get(name, (WeightScheme(8, is_float=True, group_size=None), False))
    weight = random_quantised(scheme, (NUM_EXPERTS, 8, 128), is_reordered=is_reordered)
    if name == "float8_tensor":
        static = replace(scheme, activations="float8_tensor")
        weight = replace(weight, scheme=static, input_scale=torch.linspace(0.1, 0.5, NUM_EXPERTS))
    assert len(weight.matrices) == NUM_EXPERTS
    for field in ("values", "scales", "zero_points", "input_order", "input_scale"):
        whole, parts = getattr(weight, field), [getattr(matrix, field) for matrix in weight.matrices]
        if whole is None:
            assert parts == [None] * NUM_EXPERTS
        else:
            assert all(torch.equal(part.float(), own.float()) for part, own in zip(parts, whole, strict=True))
            assert not torch.equal(parts[0].float(), parts[1].float())


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_a_quantised_weight_stays_packed(ops: Operations) -> None:
    weight = random_weight("int4_zeros", rows=64, width=256)
    assert ops.pack(weight).nbytes == 64 * (256 // 2 + 256 // 16 * (2 + 1))


def test_rounding_to_nearest_is_within_half_a_step() -> None:
    weight = random(40, 200)
    for scheme, largest in ((WeightScheme(4, False, 64), 7), (WeightScheme(8, False, None), 127)):
        rounded = quantise(weight, scheme)
        assert rounded.shape == (40, 200)
        group = scheme.group_size or 200
        for start in range(0, 200, group):
            part = slice(start, start + group)
            step = weight[:, part].abs().amax(1, keepdim=True) / largest
            error = (dense_of(rounded)[:, part] - weight[:, part]).abs()
            assert (error <= step * 0.5001).all()


def test_rounding_to_float8_is_within_a_sixteenth() -> None:
    weight = random(40, 200)
    rounded = dense_of(quantise(weight, WeightScheme(8, is_float=True, group_size=None)))
    smallest = weight.abs().amax(1, keepdim=True) / 448 * 2**-10  # half of the least step, near 0
    assert ((rounded - weight).abs() <= torch.maximum(weight.abs() / 16, smallest) * 1.0001).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(8, 8)}, "values is torch.float32"),
        ({"scales": torch.zeros(8, 3)}, "scales is torch.float32"),
        ({"zero_points": torch.zeros(8, 2, dtype=torch.uint8)}, "zero_points"),
        ({"input_order": torch.zeros(7, dtype=torch.int64)}, "input_order"),
        ({"input_scale": torch.tensor(1.0)}, "input_scale"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    weight = quantise(random(8, 16), WeightScheme(4, is_float=False, group_size=8))
    with pytest.raises(ValueError, match=message):
        replace(weight, **change)  # type: ignore[arg-type]  # a wrong value is the point
