"""Mixture of experts: each operation, and the layer they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernels.interface import Operations
from tests.benchmarks.case import Bound, Case, Prepare, Workload
from tests.benchmarks.elementwise_cases import ELEMENTWISE_GOAL_PERCENT
from tests.benchmarks.expert_inputs import ExpertInputs
from tests.benchmarks.model_shape import ModelShape
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.tensors import random

DECODE_GOAL_PERCENT = 75.0
LAYER = "route_topk+sort_tokens_by_expert+grouped_gemm+silu_and_mul+grouped_gemm+combine_experts"
LAYER_FORMULA = "bandwidth: 2 (E' 3 I H + 2 T H) bytes, E': experts with tokens; matmul: 2 T top_k 3 I H FLOP"


def expert_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Routing is uniform: of 128 experts, 64 tokens with 8 choices reach 126."""
    few, many = sizes.few_tokens, sizes.many_tokens
    for model in (model for model in models if model.num_experts):
        experts = f"E {model.num_experts}, top {model.experts_per_token}, H {model.hidden_size}"
        for tokens in (1, 4):
            prepare = _small_batch(ops, model, tokens)
            yield Case("moe_small_batch", model.name, f"T {tokens}, {experts}", "bandwidth", prepare)
        for tokens in (few // 4, few, 4 * few, many):
            bound: Bound = "matmul" if tokens == many else "bandwidth"
            goal = DECODE_GOAL_PERCENT if tokens == few else None
            prepare = _layer(ops, model, tokens, bound)
            yield Case(LAYER, model.name, f"expert layer, T {tokens}, {experts}", bound, prepare, goal)
            for name, gather in (("gate_up", True), ("down", False)):
                prepare = _gemm(ops, model, tokens, bound, gather=gather)
                yield Case("grouped_gemm", model.name, f"{name}, T {tokens}, {experts}", bound, prepare)
        for tokens, goal in ((few, None), (many, ELEMENTWISE_GOAL_PERCENT)):
            shape = f"T {tokens}, {experts}"
            yield Case("route_topk", model.name, shape, "bandwidth", _route(ops, model, tokens))
            yield Case("sort_tokens_by_expert", model.name, shape, "bandwidth", _sort(ops, model, tokens))
            yield Case("combine_experts", model.name, shape, "bandwidth", _combine(ops, model, tokens), goal)


def _layer(ops: Operations, model: ModelShape, num_tokens: int, bound: Bound) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = ExpertInputs(model, num_tokens, device)
        gate_up, down = ops.pack(inputs.gate_up), ops.pack(inputs.down)

        def run() -> torch.Tensor:
            routed = ops.route_topk(inputs.logits, inputs.top_k, renormalise=True)
            layout = ops.sort_tokens_by_expert(routed.expert_ids, inputs.num_experts)
            hidden = ops.silu_and_mul(ops.grouped_gemm(inputs.x, gate_up, layout, gather=True))
            rows = ops.grouped_gemm(hidden, down, layout, gather=False)
            return ops.combine_experts(rows, layout, routed.weights)

        return Workload(_layer_amount(inputs, bound), LAYER_FORMULA, run, {"torch with F.grouped_mm": inputs.layer})

    return prepare


def _layer_amount(inputs: ExpertInputs, bound: Bound) -> int:
    weights_of_an_expert = inputs.gate_up[0].numel() + inputs.down[0].numel()
    if bound == "matmul":
        return 2 * inputs.num_pairs * weights_of_an_expert
    return 2 * (inputs.num_reached * weights_of_an_expert + 2 * inputs.x.numel())


def _small_batch(ops: Operations, model: ModelShape, num_tokens: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = ExpertInputs(model, num_tokens, device)
        gate_up, down = ops.pack(inputs.gate_up), ops.pack(inputs.down)
        return Workload(
            _layer_amount(inputs, "bandwidth"),
            "2 (E' 3 I H + 2 T H) bytes, E': experts with tokens",
            lambda: ops.moe_small_batch(inputs.x, gate_up, down, inputs.routed),
            {"torch with F.grouped_mm": inputs.experts},
        )

    return prepare


def _gemm(ops: Operations, model: ModelShape, num_tokens: int, bound: Bound, *, gather: bool) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = ExpertInputs(model, num_tokens, device)
        weight = ops.pack(inputs.gate_up if gather else inputs.down)
        _, n, k = weight.shape
        x = inputs.x if gather else random(inputs.num_pairs, k, device=device)
        num_bytes = 2 * (inputs.num_reached * n * k + x.numel() + inputs.num_pairs * n)
        return Workload(
            2 * inputs.num_pairs * n * k if bound == "matmul" else num_bytes,
            "bandwidth: 2 (E' N K + x + T top_k N) bytes, E': experts with tokens; matmul: 2 T top_k N K FLOP",
            lambda: ops.grouped_gemm(x, weight, inputs.layout, gather=gather),
            {"gather, F.grouped_mm": inputs.grouped_gate_up}
            if gather
            else {"F.grouped_mm": lambda: inputs.grouped_down(x)},
        )

    return prepare


def _route(ops: Operations, model: ModelShape, num_tokens: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = ExpertInputs(model, num_tokens, device)
        return Workload(
            2 * inputs.logits.numel() + 12 * inputs.num_pairs,
            "2 T E + 12 T top_k bytes",
            lambda: ops.route_topk(inputs.logits, inputs.top_k, renormalise=True).weights,
            {"torch softmax, topk": lambda: inputs.route().weights},
        )

    return prepare


def _sort(ops: Operations, model: ModelShape, num_tokens: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = ExpertInputs(model, num_tokens, device)
        return Workload(
            16 * inputs.num_pairs + 8 * (inputs.num_experts + 1),
            "16 T top_k + 8 (E + 1) bytes",
            lambda: ops.sort_tokens_by_expert(inputs.routed.expert_ids, inputs.num_experts).pair_ids,
            {"torch sort, searchsorted": lambda: inputs.sort().pair_ids},
        )

    return prepare


def _combine(ops: Operations, model: ModelShape, num_tokens: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = ExpertInputs(model, num_tokens, device)
        rows = random(inputs.num_pairs, model.hidden_size, device=device)
        return Workload(
            2 * (rows.numel() + inputs.x.numel()) + 12 * inputs.num_pairs,
            "2 (T top_k H + T H) + 12 T top_k bytes",
            lambda: ops.combine_experts(rows, inputs.layout, inputs.routed.weights),
            {"torch scatter, bmm": lambda: inputs.combine(rows)},
        )

    return prepare
