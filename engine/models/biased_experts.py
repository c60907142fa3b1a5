"""Experts with biases, all of a layer in one stored tensor: gpt-oss'. Their MLP, and how its weights are read.

Files of MXFP4 (OCP Microscaling Formats 1.0) have 4-bit floats, e2m1, with a power of two for each 32 inputs. No
product takes those. Twice each of them is a whole number of 12 at most, so that they are kept as integers of 8 bits
with a scale for each 32: exactly what the file says, in half of what bfloat16 would take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.checkpoint.moe_config import MoeConfig
from engine.models.placement import ModelPlacement
from kernels.interface import Operations
from kernels.operands import ExpertOutputs, PackedWeight
from kernels.quantised import QuantisedWeight, WeightScheme

GROUP = 32  # inputs that share a scale
SCHEME = WeightScheme(8, is_float=False, group_size=GROUP)
# Twice the value of each e2m1: sign, two bits of exponent, one of mantissa.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
EXPONENT_BIAS, NO_NUMBER = 127, 255  # of a scale's byte, e8m0


class StoredExperts(Protocol):
    """Hands out each stored tensor once: `TensorSource`."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name that nobody has taken."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor in the model dtype."""

    def take_stored(self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> torch.Tensor:
        """One tensor of one of these shapes and safetensors' dtypes, as it is on disk."""


@dataclass(frozen=True, eq=False)
class BiasedMoeMLP:
    """Routed experts with biases, in the router too, and a SwiGLU whose both sides are clamped.

    Tokens are sorted by expert however few they are: products pair by pair (`engine.moe.bucketed` off) have no biases.
    """

    ops: Operations
    router: PackedWeight  # [E, H]
    router_bias: torch.Tensor  # [E]
    gate_up_proj: PackedWeight  # [E, 2I, H], gates first
    gate_up_bias: torch.Tensor  # [E, 2I], likewise
    down_proj: PackedWeight  # [E, H, I]
    down_bias: torch.Tensor  # [E, H]
    top_k: int
    alpha: float
    limit: float

    def forward(self, x: torch.Tensor) -> ExpertOutputs:
        """x [T, H] -> what is added up to [T, H]."""
        ops = self.ops
        logits = ops.linear(x, self.router).add_(self.router_bias)
        # The softmax of the chosen logits alone is that of all, renormalised.
        weights, layout = ops.route_and_sort(logits, self.top_k, renormalise=True)
        places = torch.arange(layout.pair_ids.shape[0], device=x.device)
        experts = torch.searchsorted(layout.expert_offsets[1:], places, right=True)
        hidden = ops.grouped_gemm(x, self.gate_up_proj, layout, gather=True).add_(self.gate_up_bias[experts])
        hidden = ops.clamped_swiglu(hidden, self.alpha, self.limit)
        rows = ops.grouped_gemm(hidden, self.down_proj, layout, gather=False).add_(self.down_bias[experts])
        return ExpertOutputs(rows, layout, weights)


def load_biased_experts(
    source: StoredExperts, placement: ModelPlacement, prefix: str, moe: MoeConfig, hidden: int
) -> BiasedMoeMLP:
    """The experts below `prefix`, a layer's `mlp`. Raises CheckpointError naming a missing or misshapen tensor."""
    if moe.clamp is None:
        raise ValueError("experts without a clamp")
    num_experts, inner = moe.num_experts, moe.intermediate_size
    router, experts = f"{prefix}.router", f"{prefix}.experts"
    gate_up = _take(source, f"{experts}.gate_up_proj", (num_experts, 2 * inner, hidden))
    return BiasedMoeMLP(
        ops=placement.ops,
        router=placement.ops.pack(source.take(f"{router}.weight", (num_experts, hidden)), keep_dtype=True),
        router_bias=source.take(f"{router}.bias", (num_experts,)),
        gate_up_proj=placement.pack(_gates_first(gate_up)),
        gate_up_bias=_rows_gates_first(source.take(f"{experts}.gate_up_proj_bias", (num_experts, 2 * inner))),
        down_proj=placement.pack(_take(source, f"{experts}.down_proj", (num_experts, hidden, inner))),
        down_bias=source.take(f"{experts}.down_proj_bias", (num_experts, hidden)),
        top_k=moe.experts_per_token,
        alpha=moe.clamp.alpha,
        limit=moe.clamp.limit,
    )


def _take(source: StoredExperts, name: str, shape: tuple[int, int, int]) -> torch.Tensor | QuantisedWeight:
    """A weight [E, N, K]: packed, or stored [E, K, N] in floats."""
    num_experts, rows, width = shape
    if not source.has(f"{name}_blocks"):
        return source.take(name, (num_experts, width, rows)).transpose(1, 2).contiguous()
    blocks = source.take_stored(f"{name}_blocks", [(num_experts, rows, width // GROUP, GROUP // 2)], ("U8",))
    exponents = source.take_stored(f"{name}_scales", [(num_experts, rows, width // GROUP)], ("U8",))
    return unpacked(blocks, exponents)


def unpacked(blocks: torch.Tensor, exponents: torch.Tensor) -> QuantisedWeight:
    """A weight [E, N, K] from its blocks [E, N, K / 32, 16] uint8, the even input in the lower half of each byte, and
    their scales' exponents [E, N, K / 32] uint8.
    """
    doubled = torch.tensor(DOUBLED, dtype=torch.int8, device=blocks.device)
    values = blocks.new_empty((*blocks.shape, 2), dtype=torch.int8)
    for expert in range(blocks.shape[0]):  # an index takes 4 bytes an element: of one expert at a time
        own = blocks[expert].int()
        values[expert, ..., 0] = doubled[own & 15]
        values[expert, ..., 1] = doubled[own >> 4]
    powers = exponents.int() - EXPONENT_BIAS - 1  # of half
    scales = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
    scales = scales.masked_fill_(exponents == NO_NUMBER, torch.nan).to(torch.bfloat16)
    return QuantisedWeight(SCHEME, values.flatten(2), scales)


def _gates_first(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor | QuantisedWeight:
    """Rows of gate and up by turns [E, 2I, K] -> those of the gate, then those of up."""
    if isinstance(weight, torch.Tensor):
        return _rows_gates_first(weight)
    return QuantisedWeight(weight.scheme, _rows_gates_first(weight.values), _rows_gates_first(weight.scales))


def _rows_gates_first(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)
