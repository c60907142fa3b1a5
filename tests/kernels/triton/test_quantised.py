"""Triton's products with quantised weights agree with the reference, for one matrix and for experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from kernels import reference
from kernels.interface import KernelsUnavailable
from kernels.operands import RoutedExperts
from kernels.quantised import QuantisedWeight, WeightScheme
from kernels.triton import quantised, quantised_gemm
from kernels.triton.experts import sort_tokens_by_expert
from kernels.triton.packed_quantised import PackedSteps, check_scheme, pack_steps
from kernels.triton.quantised import grouped_gemm, linear, moe_small_batch, pack, rounded_for
from kernels.triton.quantised_gemm import QuantisedGemmLaunch
from kernels.triton.round_activations import RoundedActivations, round_activations
from tests.support.tensors import assert_close, framed, randn, random_quantised, routing

pytestmark = pytest.mark.usefixtures("guarded_memory")

# name -> scheme, whether inputs are reordered
SCHEMES = {
    "int4_128": (WeightScheme(4, is_float=False, group_size=128), False),
    "int4_64_zeros": (WeightScheme(4, is_float=False, group_size=64, symmetric=False), False),
    "int4_32_zeros_order": (WeightScheme(4, is_float=False, group_size=32, symmetric=False), True),
    "int4_96": (WeightScheme(4, is_float=False, group_size=96), False),  # steps of 64 that end within a group
    "int4_16": (WeightScheme(4, is_float=False, group_size=16), False),
    "int4_channel_zeros": (WeightScheme(4, is_float=False, group_size=None, symmetric=False), False),
    "int8_128": (WeightScheme(8, is_float=False, group_size=128), False),
    "int8_32_zeros_order": (WeightScheme(8, is_float=False, group_size=32, symmetric=False), True),
    "int8_channel": (WeightScheme(8, is_float=False, group_size=None), False),
    "int8_activations": (WeightScheme(8, is_float=False, group_size=None, activations="int8_token"), False),
    "int8_activations_64": (WeightScheme(8, is_float=False, group_size=64, activations="int8_token"), True),
    "float8_channel": (WeightScheme(8, is_float=True, group_size=None), False),
    "float8_token": (WeightScheme(8, is_float=True, group_size=None, activations="float8_token"), False),
    "float8_tensor": (WeightScheme(8, is_float=True, group_size=None, activations="float8_tensor"), False),
    "float8_blocks": (WeightScheme(8, is_float=True, group_size=128, block_rows=24, activations="float8_group"), False),
}
NUM_COLUMNS, DEPTH = 70, 300  # no multiple of a tile, a step, a group or a block
NUM_EXPERTS, TOP_K = 5, 2
FEW_TOKENS = 3  # taken pair by pair: the interpreter takes 20 ms for a pair


def weight_of(name: str, *shape: int) -> QuantisedWeight:
    scheme, is_reordered = SCHEMES[name]
    made = replace(scheme, activations="none")
    weight = random_quantised(made, shape or (NUM_COLUMNS, DEPTH), is_reordered=is_reordered)
    scales = torch.linspace(0.01, 0.02, shape[0]) if len(shape) == 3 else torch.tensor(0.01)
    return replace(weight, scheme=scheme, input_scale=scales if scheme.activations == "float8_tensor" else None)


def on(device: torch.device, weight: QuantisedWeight) -> QuantisedWeight:
    moved = {
        name: getattr(weight, name).to(device)
        for name in ("values", "scales", "zero_points", "input_order", "input_scale")
        if getattr(weight, name) is not None
    }
    return replace(weight, **moved)


def plain(weight: QuantisedWeight) -> QuantisedWeight:
    """The same without rounding of activations: those that a test gives to the reference are rounded already."""
    return replace(weight, scheme=replace(weight.scheme, activations="none"), input_scale=None)


def as_taken(x: torch.Tensor, weight: PackedSteps) -> torch.Tensor:
    """Activations in float32 as the product takes them: rounded where the scheme says so."""
    found = rounded_for(x, weight)
    return x.float().cpu() if found is None else meaning(found)


def meaning(rounded: RoundedActivations) -> torch.Tensor:
    values, scales = rounded.values.float().cpu(), rounded.scales.cpu()
    group = -(-values.shape[1] // scales.shape[1]) if scales.shape[1] == 1 else 128
    return values * scales.repeat_interleave(group, 1)[:, : values.shape[1]]


def expected_linear(x: torch.Tensor, weight: QuantisedWeight, packed: PackedSteps) -> torch.Tensor:
    wide = reference.linear(as_taken(x, packed), reference.pack(plain(weight)))
    return wide.to(x.dtype)


def packed_on(device: torch.device, weight: QuantisedWeight) -> PackedSteps:
    packed = pack(on(device, weight))
    assert isinstance(packed, PackedSteps)
    return packed


@pytest.mark.parametrize("num_tokens", [0, 1, 20, 150])  # tiles of 16, 32 and 128
@pytest.mark.parametrize("name", SCHEMES)
def test_linear_agrees_with_the_reference(name: str, num_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
    weight = weight_of(name)
    packed = packed_on(device, weight)
    x = framed(randn(num_tokens, DEPTH, seed=1, device=device, dtype=dtype))
    expected = expected_linear(x, weight, packed)
    assert_close(linear(x, packed).cpu(), expected)
    gated = linear(x, packed, gated=True).cpu()
    assert_close(gated, reference.silu_and_mul(expected), max_steps=128.0 if dtype is torch.float32 else 8.0)


@pytest.mark.parametrize("num_tokens", [20, 150, 260])  # 260: three tiles, for which no depth is split
@pytest.mark.parametrize("name", ["int4_96", "int4_channel_zeros", "int8_32_zeros_order", "int8_activations"])
def test_depths_in_splits_agree_with_the_reference(name: str, num_tokens: int, device: torch.device) -> None:
    """The second split of 3, 5 or 10 steps is shorter, or as long."""
    weight = weight_of(name)
    packed = packed_on(device, weight)
    x = framed(randn(num_tokens, DEPTH, seed=1, device=device, dtype=torch.float32))
    with mock.patch.object(QuantisedGemmLaunch, "num_splits", return_value=2) as asked:
        assert_close(linear(x, packed).cpu(), expected_linear(x, weight, packed))
    assert asked.called == (num_tokens < 260)


def test_row_tiles_run_in_groups(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of two, then one of a single tile, across three tiles of columns."""
    monkeypatch.setattr(quantised_gemm, "ROW_TILES_SIDE_BY_SIDE", 2)
    weight = random_quantised(WeightScheme(4, is_float=False, group_size=16), (NUM_COLUMNS, 32), is_reordered=False)
    packed = packed_on(device, weight)
    x = randn(300, 32, seed=1, device=device, dtype=torch.float32)
    assert_close(linear(x, packed).cpu(), expected_linear(x, weight, packed))


@pytest.mark.parametrize("name", SCHEMES)
def test_experts_agree_with_the_reference(name: str, device: torch.device, dtype: torch.dtype) -> None:
    hidden, inner, num_tokens = 136, 40, 13
    gate_up, down = weight_of(name, NUM_EXPERTS, 2 * inner, hidden), weight_of(name, NUM_EXPERTS, hidden, inner)
    packed = packed_on(device, gate_up), packed_on(device, down)
    x = framed(randn(num_tokens, hidden, seed=1, device=device, dtype=dtype))
    routed = routing(num_tokens, NUM_EXPERTS, TOP_K, device)
    layout = sort_tokens_by_expert(routed.expert_ids, NUM_EXPERTS)
    on_cpu = reference.sort_tokens_by_expert(routed.expert_ids.cpu(), NUM_EXPERTS)
    plains = [reference.pack(plain(weight)) for weight in (gate_up, down)]

    expected = reference.grouped_gemm(as_taken(x, packed[0]), plains[0], on_cpu, gather=True).to(dtype)
    assert_close(grouped_gemm(x, packed[0], layout, gather=True).cpu(), expected)
    rows = grouped_gemm(x, packed[0], layout, gather=True, gated=True)
    assert_close(rows.cpu(), reference.silu_and_mul(expected), max_steps=128.0 if dtype is torch.float32 else 8.0)

    outputs = grouped_gemm(rows, packed[1], layout, gather=False)
    expected = reference.grouped_gemm(as_taken(rows, packed[1]), plains[1], on_cpu, gather=False).to(dtype)
    assert_close(outputs.cpu(), expected)
    # Pair by pair the same sums are taken, of the same roundings.
    combined = reference.combine_experts(outputs.cpu(), on_cpu, routed.weights.cpu())
    few = RoutedExperts(routed.weights[:FEW_TOKENS], routed.expert_ids[:FEW_TOKENS])
    assert_close(moe_small_batch(x[:FEW_TOKENS], *packed, few).cpu(), combined[:FEW_TOKENS])


@pytest.mark.parametrize("quantised_one", [0, 1])
def test_one_of_an_experts_weights_may_be_quantised_alone(quantised_one: int, device: torch.device) -> None:
    hidden, inner = 64, 32
    shapes = ((NUM_EXPERTS, 2 * inner, hidden), (NUM_EXPERTS, hidden, inner))
    tensors: list[torch.Tensor | QuantisedWeight] = [
        weight_of("int4_16", *shape)
        if index == quantised_one
        else randn(*shape, seed=3, device=torch.device("cpu")) / hidden**0.5
        for index, shape in enumerate(shapes)
    ]
    packed = [pack(on(device, t) if isinstance(t, QuantisedWeight) else t.to(device)) for t in tensors]
    x, routed = randn(3, hidden, seed=1, device=device), routing(3, NUM_EXPERTS, TOP_K, device)
    routed_on_cpu = RoutedExperts(routed.weights.cpu(), routed.expert_ids.cpu())
    gate_up, down = (reference.pack(tensor) for tensor in tensors)
    expected = reference.moe_small_batch(x.cpu(), gate_up, down, routed_on_cpu)
    assert_close(moe_small_batch(x, packed[0], packed[1], routed).cpu(), expected, max_steps=256.0)


@pytest.mark.parametrize("name", ["float8_token", "float8_tensor", "float8_blocks"])
def test_activations_stay_where_the_gpu_has_no_float8(
    name: str, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "compute_capability", lambda: 80)
    weight = weight_of(name)
    packed = packed_on(device, weight)
    x = randn(9, DEPTH, seed=1, device=device, dtype=dtype)
    assert rounded_for(x, packed) is None
    assert_close(linear(x, packed).cpu(), reference.linear(x.cpu(), reference.pack(weight)))


def test_every_float8_is_multiplied_exactly(device: torch.device, dtype: torch.dtype) -> None:
    """By 1, in a scheme that leaves activations alone: all 254 finite values, the subnormal ones too."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    values = torch.zeros(len(codes), 16, dtype=torch.uint8)
    values[:, 3] = codes
    scheme = WeightScheme(8, is_float=True, group_size=None)
    weight = QuantisedWeight(scheme, values.view(torch.float8_e4m3fn), torch.ones(len(codes), 1))
    x = torch.zeros(1, 16, dtype=dtype, device=device)
    x[0, 3] = 1
    expected = codes.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(linear(x, packed_on(device, weight)).cpu()[0], expected)


@pytest.mark.parametrize(
    ("bits", "base", "dtype", "values"),
    [
        (quantised_gemm.FLOAT16_BITS, quantised_gemm.FLOAT16_BASE, torch.float16, 256),
        (quantised_gemm.BFLOAT16_BITS, quantised_gemm.BFLOAT16_BASE, torch.bfloat16, 128),
        (quantised_gemm.FLOAT32_BITS, quantised_gemm.FLOAT32_BASE, torch.float32, 256),
    ],
)
def test_a_base_plus_an_integer_is_its_bits(bits: int, base: float, dtype: torch.dtype, values: int) -> None:
    """bfloat16 too, in which no interpreter computes."""
    integers = torch.arange(values, dtype=torch.int32 if dtype is torch.float32 else torch.int16)
    assert torch.equal((integers | bits).view(dtype).double() - base, integers.double())


# round_activations
def test_float8_is_rounded_as_pytorch_rounds_it(device: torch.device) -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    magnitudes = torch.cat([codes, middles, middles * 0.9999, middles * 1.0001, torch.tensor([500.0, 1e9])])
    x = torch.cat([magnitudes, -magnitudes]).view(1, -1)
    found = round_activations(x.to(device), torch.float8_e4m3fn, scale=torch.ones(1, device=device))
    assert torch.equal(found.values.float().cpu(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize(("target", "step"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 1 / 16)])
def test_activations_are_rounded_to_nearest(
    target: torch.dtype, step: float, group_size: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    x = framed(randn(5, 200, seed=1, device=device, dtype=dtype))
    x[2] = 0
    x[3, 7] = 60  # its group's largest
    found = round_activations(x, target, group_size=group_size)
    groups = group_size or 200
    wide = x.float().cpu()
    scales = found.scales.cpu().repeat_interleave(groups, 1)[:, :200]
    error = (found.values.float().cpu() * scales - wide).abs()
    largest = scales * (127 if target is torch.int8 else 448)
    allowed = step * largest if target is torch.int8 else (step * wide.abs()).clamp(min=2**-10 / 448 * 448) * 1.001
    assert bool((error <= allowed * 1.001 + 1e-6 * largest).all())
    assert float(found.values.float().abs().max()) == (127 if target is torch.int8 else 448)
    assert bool((found.values.float()[2] == 0).all())


@pytest.mark.parametrize(
    ("name", "poison"),
    [
        *(("int4_128", torch.nan), ("int8_activations", torch.nan), ("float8_token", torch.nan)),
        *(("int8_activations", torch.inf), ("float8_token", torch.inf)),
        *(("float8_blocks", torch.inf), ("float8_tensor", torch.nan)),
    ],
)
def test_what_is_not_finite_shows_in_its_own_row_alone(name: str, poison: float, device: torch.device) -> None:
    x = randn(3, DEPTH, seed=1, device=device, dtype=torch.float16)
    x[1, 5] = poison
    found = linear(x, packed_on(device, weight_of(name))).isfinite().cpu()
    assert found.all(1).tolist() == [True, False, True]
    assert not found[1].any()


# pack
def test_weights_stay_packed(device: torch.device) -> None:
    packed = pack(on(device, weight_of("int4_64_zeros", 64, 256)))
    assert packed.nbytes == 64 * (256 // 2 + 256 // 64 * (2 + 1))
    bytes_of_8_bits = on(device, weight_of("int8_channel", 64, 256))
    held = packed_on(device, bytes_of_8_bits)
    assert held.values.data_ptr() == bytes_of_8_bits.values.data_ptr()


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (WeightScheme(4, is_float=False, group_size=24), "groups of 24; accepted: groups of a multiple of 16, or cpu"),
        (
            WeightScheme(8, False, None, symmetric=False, activations="int8_token"),
            "beside symmetric integers of 8 bits",
        ),
        (WeightScheme(8, False, 16, activations="int8_token"), "groups of a multiple of 32 beside activations"),
        (WeightScheme(8, True, None, activations="float8_group"), "activations in groups beside weights in groups"),
    ],
)
def test_schemes_without_kernels_are_refused_by_name(scheme: WeightScheme, message: str) -> None:
    with pytest.raises(KernelsUnavailable, match=message):
        check_scheme(scheme)


def swapped_nibbles(packed: PackedSteps) -> PackedSteps:
    return replace(packed, values=packed.values >> 4 | packed.values << 4)


def moved_zeros(packed: PackedSteps) -> PackedSteps:
    assert packed.zero_points is not None
    return replace(packed, zero_points=packed.zero_points + 1)


def without_order(packed: PackedSteps) -> PackedSteps:
    return replace(packed, input_order=None)


def moved_groups(packed: PackedSteps) -> PackedSteps:
    return replace(packed, scales=packed.scales.roll(1, -2))


def moved_rows(packed: PackedSteps) -> PackedSteps:
    return replace(packed, scales=packed.scales.roll(1, -1))


def transposed_scales(packed: PackedSteps) -> PackedSteps:
    return replace(packed, scales=packed.scales.mT.contiguous().view(packed.scales.shape))


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("int4_32_zeros_order", swapped_nibbles),
        ("int4_32_zeros_order", moved_zeros),
        ("int8_32_zeros_order", moved_zeros),
        ("int4_32_zeros_order", without_order),
        ("int4_32_zeros_order", moved_groups),
        ("float8_blocks", moved_rows),
        ("float8_blocks", transposed_scales),
    ],
)
def test_a_planted_error_is_caught(
    name: str, spoil: Callable[[PackedSteps], PackedSteps], device: torch.device
) -> None:
    weight = weight_of(name)
    packed = packed_on(device, weight)
    x = randn(3, DEPTH, seed=1, device=device, dtype=torch.float16)
    expected = expected_linear(x, weight, packed)
    assert_close(linear(x, packed).cpu(), expected)
    with pytest.raises(AssertionError):
        assert_close(linear(x, spoil(packed)).cpu(), expected)


def test_packing_a_few_rows_at_a_time_packs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of("int4_32_zeros_order", 3, 70, 100)
    whole = pack_steps(weight)
    monkeypatch.setattr("kernels.triton.packed_quantised.SLAB_ELEMENTS", 1000)
    assert torch.equal(pack_steps(weight).values, whole.values)
