"""Brings the tensors of quantised layers, in any published layout, into the one form that products take.

Nothing is dequantised: integers are repacked, scales and zero points transposed, fused layers stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.quantization_config import QuantizationConfig, StoredScheme
from engine.errors import CheckpointError
from kernels.quantised import NIBBLE_ZERO, QuantisedWeight, WeightScheme, pack_nibbles

Tensor = torch.Tensor
Shape = tuple[int, ...]
FLOATS = ("F32", "BF16", "F16")
# What files with an 8-bit KV cache have beside a layer, of keys, of values or both: AutoFP8's name, compressed-tensors'
# older ones and its own, which go before the others.
KV_SCALES = (
    (slice(0, 2), "kv_scale"),
    (slice(0, 1), "k_proj.output_scale"),
    (slice(1, 2), "v_proj.output_scale"),
    (slice(0, 1), "k_scale"),
    (slice(1, 2), "v_scale"),
)
# The nibble of a 32-bit word in which AWQ has each of 8 neighbouring outputs.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
# What GPTQ's first format subtracted from each zero point, word by word: 1 in every nibble, or in every byte.
ONES = {4: 0x11111111, 8: 0x01010101}


class StoredTensors(Protocol):
    """Hands out each stored tensor once: `TensorSource` of engine.models.tensor_source."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name that nobody has taken."""

    def take_stored(self, name: str, shapes: Sequence[Shape], dtypes: Sequence[str]) -> Tensor:
        """One tensor of one of these shapes and safetensors' dtypes, as it is on disk."""

    def take_fused(self, names: Sequence[str], shapes: Sequence[Shape]) -> Tensor:
        """Unquantised matrices stacked on top of each other: [sum of rows, width]."""

    def take_experts(self, names: Sequence[Sequence[str]], shapes: Sequence[tuple[int, int]]) -> Tensor:
        """For each expert its unquantised matrices stacked: [num_experts, sum of rows, width]."""


def take_kv_scales(source: StoredTensors, prefix: str, config: ModelConfig) -> Tensor:
    """What a layer's keys, then its values, in float8 are multiplied by: [2, Hkv] float32, 1 where the checkpoint
    announces none or has none, as in vLLM. prefix: of the names, to `self_attn`. One number, or one a KV head.

    Raises CheckpointError for a scale that is not above 0 and finite, or has another shape.
    """
    scales = torch.ones(2, config.num_kv_heads)
    is_announced = config.quantization is not None and config.quantization.has_kv_scales
    for rows, name in KV_SCALES if is_announced else ():
        if not source.has(f"{prefix}.{name}"):
            continue
        scale = source.take_stored(f"{prefix}.{name}", ((1,), (), (config.num_kv_heads,)), FLOATS).float().cpu()
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise CheckpointError(f"tensor {prefix}.{name} holds {scale.tolist()}; accepted: finite numbers above 0")
        scales[rows] = scale
    return scales


def take_weight(
    source: StoredTensors,
    quantization: QuantizationConfig | None,
    modules: Sequence[str],
    shapes: Sequence[tuple[int, int]],
) -> Tensor | QuantisedWeight:
    """The weights of linear layers with one input, by their names without `.weight`, stacked: [sum of rows, width].

    Raises CheckpointError, also where they are not all quantised alike.
    """
    stored = _common_scheme(source, quantization, modules)
    if stored is None:
        return source.take_fused([f"{module}.weight" for module in modules], shapes)
    return _stack_rows(source, modules, shapes, stored)


def take_experts(
    source: StoredTensors,
    quantization: QuantizationConfig | None,
    modules: Sequence[Sequence[str]],
    shapes: Sequence[tuple[int, int]],
) -> Tensor | QuantisedWeight:
    """For each expert the weights of its layers with one input, stacked: [num_experts, sum of rows, width].

    Raises CheckpointError, also where they are not all quantised alike.
    """
    stored = _common_scheme(source, quantization, [module for expert in modules for module in expert])
    if stored is None:
        names = [[f"{module}.weight" for module in expert] for expert in modules]
        return source.take_experts(names, shapes)
    return _stack_experts([_stack_rows(source, expert, shapes, stored) for expert in modules])


def in_order(weight: Tensor | QuantisedWeight, order: Tensor) -> Tensor | QuantisedWeight:
    """The rows of a weight [N, K] in another order: order [N] int64."""
    if not isinstance(weight, QuantisedWeight):
        return weight.index_select(0, order)
    weight = _with_scales_of_rows(weight)
    zeros = weight.zero_points
    return replace(
        weight,
        values=weight.values.index_select(0, order),
        scales=weight.scales.index_select(0, order),
        zero_points=None if zeros is None else zeros.index_select(0, order),
    )


def _common_scheme(
    source: StoredTensors, quantization: QuantizationConfig | None, modules: Sequence[str]
) -> StoredScheme | None:
    if quantization is None:
        return None
    found = {module: quantization.scheme_of(module, source.has) for module in modules}
    first = found[modules[0]]
    other = next((module for module, stored in found.items() if stored != first), None)
    if other is not None:
        raise CheckpointError(
            f"{modules[0]} ({_shown(first)}) and {other} ({_shown(found[other])}) are multiplied together; "
            "accepted: one scheme for both"
        )
    return first


def _shown(stored: StoredScheme | None) -> str:
    return "unquantised" if stored is None else f"{stored.scheme}, {stored.layout}"


def _read(source: StoredTensors, module: str, shape: tuple[int, int], stored: StoredScheme) -> QuantisedWeight:
    """One layer's weight [N, K]."""
    per_word = 32 // stored.scheme.bits
    # Along which of N and K the layout packs words.
    packed = {"gptq": shape, "gptq_v2": shape, "awq": shape[:1], "packed": shape[1:], "plain": ()}[stored.layout]
    if any(size % per_word for size in packed):
        raise CheckpointError(f"{module}: {list(shape)} in {stored.layout}; accepted: multiples of {per_word}")
    read = {"gptq": _gptq, "gptq_v2": _gptq, "awq": _awq, "packed": _packed, "plain": _plain}[stored.layout]
    weight = read(source, module, shape, stored)
    _check_bias(source, f"{module}.bias", shape[0])
    return weight


def _check_bias(source: StoredTensors, name: str, num_rows: int) -> None:
    """AutoGPTQ writes zeros as the bias of each layer that has none."""
    if not source.has(name):
        return
    bias = source.take_stored(name, [(num_rows,)], FLOATS)
    if not bias.is_meta and bool((bias != 0).any()):
        found = float(bias[bias != 0][0])
        raise CheckpointError(f"tensor {name} holds {found:g}; accepted: no bias, or zeros")


def _gptq(source: StoredTensors, module: str, shape: tuple[int, int], stored: StoredScheme) -> QuantisedWeight:
    """qweight [K / 8, N], qzeros [G, N / 8], scales [G, N], g_idx [K]: words of 4 or 8 bits, lowest first."""
    scheme, (rows, width) = stored.scheme, shape
    bits, groups = scheme.bits, _groups(scheme, width)
    words = source.take_stored(f"{module}.qweight", [(width * bits // 32, rows)], ("I32",))
    zero_words = source.take_stored(f"{module}.qzeros", [(groups, rows * bits // 32)], ("I32",))
    scales = source.take_stored(f"{module}.scales", [(groups, rows)], FLOATS).t().contiguous()
    order = _input_order(source, f"{module}.g_idx", width, stored)
    if words.is_meta:
        return _described(scheme, shape, scales)
    values = words.t().contiguous().view(torch.uint8)
    if stored.layout == "gptq":
        zero_words = zero_words + ONES[bits]  # word by word, as it was subtracted: a zero borrowed from its neighbour
    zeros = zero_words.contiguous().view(torch.uint8)
    zeros = (_unpack_nibbles(zeros) if bits == 4 else zeros).t().contiguous()
    return _made(scheme, values, scales, _checked_zeros(module, zeros, scheme), order)


def _awq(source: StoredTensors, module: str, shape: tuple[int, int], stored: StoredScheme) -> QuantisedWeight:
    """qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]: words of 8 outputs, interleaved."""
    scheme, (rows, width) = stored.scheme, shape
    groups = _groups(scheme, width)
    words = source.take_stored(f"{module}.qweight", [(width, rows // 8)], ("I32",))
    zero_words = source.take_stored(f"{module}.qzeros", [(groups, rows // 8)], ("I32",))
    scales = source.take_stored(f"{module}.scales", [(groups, rows)], FLOATS).t().contiguous()
    if words.is_meta:
        return _described(scheme, shape, scales)
    values, zeros = (_awq_nibbles(part).t().contiguous() for part in (words, zero_words))
    return _made(scheme, pack_nibbles(values), scales, zeros, None)


def _awq_nibbles(words: Tensor) -> Tensor:
    """[n, N / 8] int32 -> [n, N] uint8, outputs in their order."""
    nibbles = _unpack_nibbles(words.contiguous().view(torch.uint8)).view(words.shape[0], -1, 8)
    return nibbles[:, :, list(AWQ_NIBBLES)].reshape(words.shape[0], -1)


def _packed(source: StoredTensors, module: str, shape: tuple[int, int], stored: StoredScheme) -> QuantisedWeight:
    """weight_packed [N, K / 8], weight_scale [N, G], weight_zero_point [N / 8, G], weight_shape, weight_g_idx."""
    scheme, (rows, width) = stored.scheme, shape
    bits, groups = scheme.bits, _groups(scheme, width)
    values = source.take_stored(f"{module}.weight_packed", [(rows, width * bits // 32)], ("I32",)).view(torch.uint8)
    scales = _scales(source, f"{module}.weight_scale", (rows, groups), scheme)
    stated = source.take_stored(f"{module}.weight_shape", [(2,)], ("I64", "I32"))
    if not stated.is_meta and stated.tolist() != list(shape):
        raise CheckpointError(f"tensor {module}.weight_shape is {stated.tolist()}; config.json asks for {list(shape)}")
    words = None
    if not scheme.symmetric:
        words = source.take_stored(f"{module}.weight_zero_point", [(-(-rows * bits // 32), groups)], ("I32",))
    order = _input_order(source, f"{module}.weight_g_idx", width, stored)
    if values.is_meta:
        return _described(scheme, shape, scales)
    zeros = None
    if words is not None:
        unpacked = words.t().contiguous().view(torch.uint8)
        unpacked = _unpack_nibbles(unpacked) if bits == 4 else unpacked
        zeros = unpacked[:, :rows].t().contiguous()
    return _made(scheme, values, scales, zeros, order)


def _plain(source: StoredTensors, module: str, shape: tuple[int, int], stored: StoredScheme) -> QuantisedWeight:
    """weight [N, K] in 8 bits; weight_scale_inv or weight_scale, of a tensor, a channel, a group or a block."""
    scheme, (rows, width) = stored.scheme, shape
    values = source.take_stored(f"{module}.weight", [shape], ("F8_E4M3",) if scheme.is_float else ("I8",))
    if scheme.is_float and not values.is_meta and has_nan(values):
        raise CheckpointError(f"tensor {module}.weight holds NaN; accepted: finite weights")
    name = "weight_scale_inv" if source.has(f"{module}.weight_scale_inv") else "weight_scale"
    grid = (rows if scheme.block_rows is None else -(-rows // scheme.block_rows), _groups(scheme, width))
    scales = _scales(source, f"{module}.{name}", grid, scheme)
    zeros = None
    if not scheme.symmetric:
        shapes: list[Shape] = [grid] if scheme.block_rows is not None else [(1,), ()]
        zeros = source.take_stored(f"{module}.weight_zero_point", shapes, ("I8",)).expand(grid).contiguous()
    input_scale = None
    if scheme.activations == "float8_tensor":
        input_scale = source.take_stored(f"{module}.input_scale", [(1,), ()], FLOATS).float().reshape(())
    return QuantisedWeight(_with_rows(scheme), values.contiguous(), scales, zeros, None, input_scale)


def has_nan(values: Tensor) -> bool:
    """Whether an e4m3 tensor [N, K] holds one, a few rows at a time: 0x7f, with either sign."""
    return any(bool(((rows.view(torch.uint8) & 0x7F) == 0x7F).any()) for rows in torch.split(values, 1024))


def _scales(source: StoredTensors, name: str, grid: tuple[int, int], scheme: WeightScheme) -> Tensor:
    """[R, G]: one for a whole tensor is written for each row."""
    if scheme.block_rows is None:
        return source.take_stored(name, [(1,), (), (1, 1)], FLOATS).reshape(1, 1).expand(grid).contiguous()
    shapes: list[Shape] = [grid] if grid[1] > 1 else [grid, grid[:1]]
    return source.take_stored(name, shapes, FLOATS).reshape(grid).contiguous()


def _made(
    scheme: WeightScheme, values: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None
) -> QuantisedWeight:
    """From values and zero points without signs, as uint8, their inputs in the file's order."""
    if scheme.bits == 8:  # 128 lower: the sign bit
        values = (values ^ 128).view(torch.int8)
        zeros = None if zeros is None else (zeros ^ 128).view(torch.int8)
    if order is not None and scheme.bits == 4:
        values = pack_nibbles(_unpack_nibbles(values).index_select(1, order))
    elif order is not None:
        values = values.index_select(1, order)
    return QuantisedWeight(_with_rows(scheme), values.contiguous(), scales, zeros, order)


def _described(scheme: WeightScheme, shape: tuple[int, int], scales: Tensor) -> QuantisedWeight:
    """What `_made` makes of tensors without values, by shapes alone.

    For `+`, `&`, `^`, cat and stack of those torch imports torch._dynamo, and with it maps 66 MB of Triton's library
    into a process that only runs on a CPU.
    """
    rows, width = shape
    size, dtype = (width // 2, torch.uint8) if scheme.bits == 4 else (width, torch.int8)
    zeros = None if scheme.symmetric else scales.new_empty(scales.shape, dtype=dtype)
    return QuantisedWeight(_with_rows(scheme), scales.new_empty((rows, size), dtype=dtype), scales, zeros)


def _with_rows(scheme: WeightScheme) -> WeightScheme:
    return scheme if scheme.block_rows is not None else replace(scheme, block_rows=1)


def _groups(scheme: WeightScheme, width: int) -> int:
    return -(-width // (scheme.group_size or width))


def _unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [n, m] -> uint8 [n, 2 m], the lower half of each byte first."""
    return torch.stack((packed & 15, packed >> 4), dim=2).view(packed.shape[0], -1)


def _checked_zeros(module: str, zeros: Tensor, scheme: WeightScheme) -> Tensor | None:
    """None where config.json says that there are none, and there are none."""
    if not scheme.symmetric:
        return zeros
    middle = NIBBLE_ZERO if scheme.bits == 4 else 128
    if not zeros.is_meta and not bool((zeros == middle).all()):
        found = int(zeros[zeros != middle][0])
        raise CheckpointError(
            f"tensor {module}.qzeros has zero point {found}; accepted: {middle}, since config.json says sym is true "
            "(gptq files store it one lower, gptq_v2 files as it is)"
        )
    return None


def _input_order(source: StoredTensors, name: str, width: int, stored: StoredScheme) -> Tensor | None:
    """The inputs [K] int64 ordered by group, from the group of each; None where they are, or the file does not say."""
    scheme = stored.scheme
    if not source.has(name):
        if stored.needs_groups:
            raise CheckpointError(f"tensor {name} is missing, and config.json says that inputs are reordered")
        return None
    groups = source.take_stored(name, [(width,)], ("I32", "I64"))
    if groups.is_meta:
        return None
    in_order = torch.arange(width) // (scheme.group_size or width)
    if torch.equal(groups.cpu().long(), in_order) or bool((groups == -1).all()):  # -1: never filled in
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].cpu().long(), in_order):
        raise CheckpointError(f"tensor {name}: groups of unequal sizes; accepted: {scheme.group_size} inputs each")
    return order


def _stack_rows(
    source: StoredTensors, modules: Sequence[str], shapes: Sequence[tuple[int, int]], stored: StoredScheme
) -> QuantisedWeight:
    """Layers with one input on top of each other: [sum of N, K]."""
    parts = [_read(source, module, shape, stored) for module, shape in zip(modules, shapes, strict=True)]
    first = parts[0]
    if len(parts) == 1:
        return first
    for module, part in zip(modules, parts, strict=True):
        if not _same(part.input_order, first.input_order):
            raise CheckpointError(
                f"{modules[0]} and {module} are multiplied together, but their g_idx differ; accepted: one for both"
            )
    block = first.scheme.block_rows or 1
    if any(shape[0] % block for shape in shapes[:-1]):  # blocks that would begin within a block of the whole
        parts = [_with_scales_of_rows(part) for part in parts]
    dtype = _common(parts, first.scales.dtype)
    return replace(
        parts[0],
        values=end_to_end([part.values for part in parts]),
        scales=end_to_end([part.scales.to(dtype) for part in parts]),
        zero_points=_joined(end_to_end, [part.zero_points for part in parts]),
        input_scale=_joined(lambda scales: side_by_side(scales).amax(), [part.input_scale for part in parts]),
    )


def _common(parts: Sequence[QuantisedWeight], dtype: torch.dtype) -> torch.dtype:
    """The dtype of all scales, or one that holds each of them."""
    return dtype if all(part.scales.dtype is dtype for part in parts) else torch.float32


def _with_scales_of_rows(part: QuantisedWeight) -> QuantisedWeight:
    def of_rows(grid: Tensor) -> Tensor:
        return grid.repeat_interleave(part.scheme.block_rows or 1, 0)[: part.shape[0]].contiguous()

    zeros = None if part.zero_points is None else of_rows(part.zero_points)
    return replace(part, scheme=replace(part.scheme, block_rows=1), scales=of_rows(part.scales), zero_points=zeros)


def _stack_experts(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Experts' matrices [N, K] -> [E, N, K]."""
    orders = [part.input_order for part in parts]
    if any(order is not None for order in orders):
        device, width = parts[0].values.device, parts[0].shape[1]
        orders = [torch.arange(width, device=device) if order is None else order for order in orders]
    dtype = _common(parts, parts[0].scales.dtype)
    return QuantisedWeight(
        parts[0].scheme,
        side_by_side([part.values for part in parts]),
        side_by_side([part.scales.to(dtype) for part in parts]),
        _joined(side_by_side, [part.zero_points for part in parts]),
        _joined(side_by_side, orders),
        _joined(side_by_side, [part.input_scale for part in parts]),
    )


def _joined(join: Callable[[list[Tensor]], Tensor], parts: Sequence[Tensor | None]) -> Tensor | None:
    """What all have, joined; None where none has it, as all of one scheme do."""
    present = [part for part in parts if part is not None]
    return join(present) if present else None


def end_to_end(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat of tensors of one dtype along the first axis; by shapes alone, as `_described`, without values."""
    if not parts[0].is_meta:
        return torch.cat(list(parts))
    return parts[0].new_empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """torch.stack of tensors of one shape and dtype; by shapes alone, as `_described`, where they have no values."""
    if not parts[0].is_meta:
        return torch.stack(list(parts))
    return parts[0].new_empty((len(parts), *parts[0].shape))


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
