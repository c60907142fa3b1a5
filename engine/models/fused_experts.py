"""Quantised experts of which all in a layer share a tensor of scales, and of weights too: FP8 files of transformers 5.

Its `FP8Experts` holds `experts.gate_up_proj` and `experts.down_proj`, [E, N, K] in e4m3, and beside each `_scale_inv`,
[E, R, G]. Saving writes them so, or splits the weights by expert and leaves the scales in one tensor, or calls the
weights as the family does: engine/DESIGN.md says when.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from engine.checkpoint.quantization_config import QuantizationConfig
from engine.errors import CheckpointError
from engine.models.quantised_weights import FLOATS, StoredTensors, end_to_end, has_nan, side_by_side
from kernels.quantised import QuantisedWeight, WeightScheme

FLOAT8 = ("F8_E4M3",)
SCALES = "_scale_inv"
ACCEPTED = "quant_method fp8 with activation_scheme dynamic"


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The matrices of a layer's experts that have one input, those of an expert on top of each other."""

    name: str  # what the scales are called by, `{name}_scale_inv`: gate_up_proj or down_proj below `experts`
    whole: str  # the tensor of all weights, where there is one
    parts: tuple[tuple[str, ...], ...]  # the tensors of each expert's weights, where there is none; empty: there is one
    shape: tuple[int, int, int]  # of all [E, N, K]

    def has_scales(self, source: StoredTensors) -> bool:
        """Whether one tensor has the scales of all."""
        return source.has(f"{self.name}{SCALES}")


def take_scaled_experts(
    source: StoredTensors, quantization: QuantizationConfig | None, stack: ExpertStack
) -> QuantisedWeight:
    """Weights [E, N, K] with the scales [E, R, G] of all in one tensor. Raises CheckpointError."""
    stored = None if quantization is None else quantization.scheme_of(stack.name, source.has)
    if stored is None or stored.layout != "plain" or not stored.scheme.is_float or _is_static(stored.scheme):
        raise CheckpointError(f"tensor {stack.name}{SCALES}: scales of all experts; accepted: {ACCEPTED}")
    scheme, (_, rows, _) = stored.scheme, stack.shape
    if scheme.block_rows is not None and rows % scheme.block_rows:
        raise CheckpointError(
            f"tensor {stack.name}{SCALES}: {rows} rows in blocks of {scheme.block_rows}; accepted: whole blocks "
            "(the second matrix might begin another)"
        )
    values = _values(source, stack)
    if not values.is_meta and has_nan(values.flatten(0, 1)):
        raise CheckpointError(f"{stack.name}: weights that are NaN; accepted: finite weights")
    return QuantisedWeight(replace(scheme, block_rows=scheme.block_rows or 1), values, _scales(source, stack, scheme))


def _is_static(scheme: WeightScheme) -> bool:
    return scheme.activations == "float8_tensor"


def _values(source: StoredTensors, stack: ExpertStack) -> Tensor:
    """[E, N, K] e4m3."""
    if source.has(stack.whole) or not stack.parts:
        return source.take_stored(stack.whole, [stack.shape], FLOAT8).contiguous()
    _, rows, width = stack.shape
    part = (rows // len(stack.parts[0]), width)
    return side_by_side(
        [end_to_end([source.take_stored(name, [part], FLOAT8) for name in names]) for names in stack.parts]
    )


def _scales(source: StoredTensors, stack: ExpertStack, scheme: WeightScheme) -> Tensor:
    """[E, R, G]; one for a whole matrix is written for each of its rows."""
    num_experts, rows, width = stack.shape
    if scheme.block_rows is None:
        scales = source.take_stored(f"{stack.name}{SCALES}", [(num_experts, 1, 1)], FLOATS)
        return scales.expand(num_experts, rows, 1).contiguous()
    grid = (num_experts, rows // scheme.block_rows, -(-width // (scheme.group_size or width)))
    return source.take_stored(f"{stack.name}{SCALES}", [grid], FLOATS).contiguous()
