"""Benchmark cases of everything but attention and sampling: projections, norms, gated activation, mixture of experts.

For experts each operation is a case, and so is the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from kernels.interface import Operations
from kernels.operands import ExpertOutputs
from kernels.quantised import WeightScheme, quantise
from kernels.reference.layers import dequantised
from tests.benchmarks.kernel_inputs import (
    EPS,
    Bound,
    Case,
    ExpertInputs,
    ModelShape,
    Prepare,
    Sizes,
    Workload,
    copy_back,
    distinct,
    random,
)

DECODE_GOAL_PERCENT = 75.0
# Rows an expert on a CPU, and what bounds them: of 8 it is either, depending on the CPU's units for products.
CPU_SCHEMES = (
    WeightScheme(bits=4, is_float=False, group_size=128),
    WeightScheme(bits=8, is_float=False, group_size=None),
    WeightScheme(bits=8, is_float=False, group_size=None, activations="int8_token"),
    WeightScheme(bits=8, is_float=True, group_size=None),
)
SCHEMES = (*CPU_SCHEMES, WeightScheme(bits=8, is_float=True, group_size=None, activations="float8_token"))
CPU_GROUPED_BOUNDS: tuple[tuple[int, Bound, float | None], ...] = (
    (8, "bandwidth", 80.0),
    (8, "matmul", None),
    (256, "matmul", 60.0),
)
LAYER = "route_topk+sort_tokens_by_expert+grouped_gemm+silu_and_mul+grouped_gemm+combine_experts"
LAYER_FORMULA = "bandwidth: 2 (E' 3 I H + 2 T H) bytes, E': experts with tokens; matmul: 2 T top_k 3 I H FLOP"


def elementwise_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """A decode step's and a prefill step's tokens. The goal is for prefill: few rows do not fill a GPU."""
    yield from _linear_cases(ops, models, sizes)
    for num_tokens, goal in ((sizes.few_tokens, None), (sizes.many_tokens, sizes.pass_goal_percent)):
        for names, model in distinct(models, lambda m: m.hidden_size):
            shape, hidden = f"T {num_tokens}, H {model.hidden_size}", model.hidden_size
            yield Case("rms_norm", names, shape, "bandwidth", _rms_norm(ops, num_tokens, hidden), goal)
            yield Case("fused_add_rms_norm", names, shape, "bandwidth", _add_norm(ops, num_tokens, hidden), goal)
        for names, model in distinct(models, lambda m: (m.intermediate_size, m.experts_per_token)):
            rows = num_tokens * max(model.experts_per_token, 1)
            shape = f"rows {rows}, I {model.intermediate_size}"
            for name, activation in _activations(ops).items():
                yield Case(name, names, shape, "bandwidth", _gated(activation, rows, model.intermediate_size), goal)
    for names, model in distinct(models, lambda m: m.vocab_size):
        shape = f"N {sizes.few_tokens}, V {model.vocab_size}"
        yield Case("cap_logits", names, shape, "bandwidth", _cap(ops, sizes.few_tokens, model.vocab_size), None)


def _linear_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    few, many = sizes.few_tokens, sizes.many_tokens
    for model in models:
        widths = {"qkv": model.qkv_width, "head": model.vocab_size}
        if not model.num_experts:
            widths["gate_up"] = 2 * model.intermediate_size
        for name, width in widths.items():
            shape = f"{name} {model.hidden_size} -> {width}"
            prepare = _linear(ops, few, model.hidden_size, width, by_bytes=True)
            yield Case("linear", model.name, f"T {few}, {shape}", "bandwidth", prepare)
            if name != "head":  # only the last token of a prompt goes through the head
                prepare = _linear(ops, many, model.hidden_size, width, by_bytes=False)
                yield Case("linear", model.name, f"T {many}, {shape}", "matmul", prepare)


def cpu_product_cases(ops: Operations, models: Sequence[ModelShape]) -> Iterator[Case]:
    """Products of a CPU's engine: a dense layer's for one request, few, a batch and a prompt, and those of experts."""
    for model in models:
        hidden, width = model.hidden_size, model.intermediate_size
        gate_up, down = (hidden, 2 * width), (width, hidden)
        for (rows, bound, goal), (k, n) in product(CPU_GROUPED_BOUNDS if model.num_experts else (), (gate_up, down)):
            tokens, is_up = rows * model.num_experts // model.experts_per_token, (k, n) == gate_up
            shape = f"{model.num_experts} experts, {rows} rows each, {k} -> {n}{', gated' if is_up else ''}"
            prepare = _gemm(ops, model, tokens, bound, gather=is_up, gated=is_up)
            yield Case("grouped_gemm", model.name, shape, bound, prepare, goal)
        for rows, (k, n) in product(() if model.num_experts else (1, 8, 64, 512), (gate_up, down)):
            bound = "bandwidth" if rows <= 8 else "matmul"
            prepare = _linear(ops, rows, k, n, by_bytes=bound == "bandwidth")
            yield Case("linear", model.name, f"{rows} rows, {k} -> {n}", bound, prepare)
        for scheme, rows in product(() if model.num_experts else CPU_SCHEMES, (1, 8, 64, 512)):
            shape = f"{rows} rows, {hidden} -> {2 * width}, {scheme}"
            prepare = _rounded(ops, scheme, rows, gate_up, by_bytes=False)
            yield Case("linear", model.name, shape, "matmul", prepare)


def quantised_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Products with weights rounded in every way, beside those of the same numbers in bfloat16."""
    dense = [model for model in models if not model.num_experts]
    tokens_of = (1, sizes.few_tokens, 4 * sizes.few_tokens, sizes.many_tokens)
    for names, model in distinct(dense, lambda m: m.hidden_size):
        wide = ("gate_up", model.hidden_size, 2 * model.intermediate_size)
        deep = ("down", model.intermediate_size, model.hidden_size)  # of few columns, so a GPU splits its depth
        cases = [*product([wide], SCHEMES, tokens_of), *product([deep], SCHEMES[:1], tokens_of[:-1])]
        for (layer, k, n), scheme, tokens in cases:
            by_bytes = tokens != sizes.many_tokens
            prepare = _rounded(ops, scheme, tokens, (k, n), by_bytes=by_bytes)
            shape = f"T {tokens}, {layer} {k} -> {n}, {scheme}"
            yield Case("linear", names, shape, "bandwidth" if by_bytes else "matmul", prepare)


def _rounded(
    ops: Operations, scheme: WeightScheme, num_tokens: int, sizes: tuple[int, int], *, by_bytes: bool
) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        k, n = sizes
        x, rounded = random(num_tokens, k, device=device), quantise(random(n, k, device=device).div_(k**0.5), scheme)
        weight, plain = ops.pack(rounded), ops.pack(dequantised(rounded).to(x.dtype))
        amount = weight.nbytes + 2 * num_tokens * (k + n) if by_bytes else 2 * num_tokens * n * k
        return Workload(
            amount,
            "bandwidth: bytes of the rounded weight and its scales + 2 (T K + T N); matmul: 2 T N K FLOP",
            lambda: ops.linear(x, weight),
            {"bfloat16": lambda: ops.linear(x, plain)},
        )

    return prepare


def _linear(ops: Operations, num_tokens: int, k: int, n: int, *, by_bytes: bool) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        x, weight = random(num_tokens, k, device=device), ops.pack(random(n, k, device=device))
        amount = 2 * (n * k + num_tokens * (k + n)) if by_bytes else 2 * num_tokens * n * k
        formula = "bandwidth: 2 (N K + T K + T N) bytes; matmul: 2 T N K FLOP; on a GPU a library call (cuBLAS)"
        return Workload(amount, formula, lambda: ops.linear(x, weight))

    return prepare


def _rms_norm(ops: Operations, num_tokens: int, hidden: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        x, weight = random(num_tokens, hidden, device=device), random(hidden, device=device)
        libraries = {"torch rms_norm": lambda: F.rms_norm(x, (hidden,), weight, EPS)}
        run = lambda: ops.rms_norm(x, weight, EPS)  # noqa: E731  (as the library's beside it)
        return Workload(2 * (2 * num_tokens * hidden + hidden), "2 (2 T H + H) bytes", run, libraries)

    return prepare


def _add_norm(ops: Operations, num_tokens: int, hidden: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        x, weight = random(num_tokens, hidden, device=device), random(hidden, device=device)
        residual = random(num_tokens, hidden, device=device)
        original = residual.clone()
        return Workload(
            2 * (4 * num_tokens * hidden + hidden),
            "2 (4 T H + H) bytes: x and residual read, residual and result written",
            lambda: ops.fused_add_rms_norm(x, residual, weight, EPS),
            {"torch add_, rms_norm": lambda: F.rms_norm(residual.add_(x), (hidden,), weight, EPS)},
            restore=lambda: copy_back(residual, original),
        )

    return prepare


class _Activation(NamedTuple):
    """Of gates and ups side by side [N, 2I], and the same in PyTorch."""

    ours: Callable[[torch.Tensor], torch.Tensor]
    library: str
    by_torch: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # gate, up [N, I]


def _activations(ops: Operations) -> Mapping[str, _Activation]:
    """By operation: Qwen's, Gemma's, gpt-oss' with its own two numbers."""
    alpha, limit = 1.702, 7.0

    def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=limit)
        return gate.mul(alpha).sigmoid_().mul_(gate).mul_(up.clamp(-limit, limit).add_(1))

    return {
        "silu_and_mul": _Activation(ops.silu_and_mul, "torch silu, mul_", lambda gate, up: F.silu(gate).mul_(up)),
        "gelu_and_mul": _Activation(
            ops.gelu_and_mul, "torch gelu, mul_", lambda gate, up: F.gelu(gate, approximate="tanh").mul_(up)
        ),
        "clamped_swiglu": _Activation(
            lambda gate_up: ops.clamped_swiglu(gate_up, alpha, limit), "torch clamp, sigmoid_, mul_", clamped
        ),
    }


def _gated(activation: _Activation, num_rows: int, width: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        gate_up = random(num_rows, 2 * width, device=device)
        library = {activation.library: lambda: activation.by_torch(*gate_up.chunk(2, dim=-1))}
        return Workload(2 * 3 * num_rows * width, "2 x 3 rows I bytes", lambda: activation.ours(gate_up), library)

    return prepare


def _cap(ops: Operations, num_rows: int, vocab_size: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        logits, cap = random(num_rows, vocab_size, device=device), 30.0
        original = logits.clone()

        def capped() -> torch.Tensor:
            ops.cap_logits(logits, cap)
            return logits

        return Workload(
            2 * 2 * num_rows * vocab_size,
            "2 x 2 N V bytes: read and written",
            capped,
            {"torch div_, tanh_, mul_": lambda: logits.div_(cap).tanh_().mul_(cap)},
            restore=lambda: copy_back(logits, original),
        )

    return prepare


def expert_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Expert layers with uniform routing: 64 tokens with 8 choices reach 126 of 128 experts."""
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
        for tokens, goal in ((few, None), (many, sizes.pass_goal_percent)):
            shape = f"T {tokens}, {experts}"
            yield Case("route_topk", model.name, shape, "bandwidth", _route(ops, model, tokens))
            yield Case("sort_tokens_by_expert", model.name, shape, "bandwidth", _sort(ops, model, tokens))
            yield Case("route_and_sort", model.name, shape, "bandwidth", _route_and_sort(ops, model, tokens))
            yield Case("combine_experts", model.name, shape, "bandwidth", _combine(ops, model, tokens), goal)
            yield Case("add_experts_rms_norm", model.name, shape, "bandwidth", _add_experts(ops, model, tokens), goal)


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


def _gemm(
    ops: Operations, model: ModelShape, num_tokens: int, bound: Bound, *, gather: bool, gated: bool = False
) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = ExpertInputs(model, num_tokens, device)
        weight = ops.pack(inputs.gate_up if gather else inputs.down)
        _, n, k = weight.shape
        x = inputs.x if gather else random(inputs.num_pairs, k, device=device)
        layout = ops.sort_tokens_by_expert(inputs.routed.expert_ids, inputs.num_experts)
        num_bytes = 2 * (inputs.num_reached * n * k + x.numel() + inputs.num_pairs * (n // 2 if gated else n))
        return Workload(
            2 * inputs.num_pairs * n * k if bound == "matmul" else num_bytes,
            "bandwidth: 2 (E' N K + x + T top_k N) bytes, E': experts with tokens; matmul: 2 T top_k N K FLOP",
            lambda: ops.grouped_gemm(x, weight, layout, gather=gather, gated=gated),
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


def _route_and_sort(ops: Operations, model: ModelShape, num_tokens: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = ExpertInputs(model, num_tokens, device)
        return Workload(
            2 * inputs.logits.numel() + 28 * inputs.num_pairs + 8 * (inputs.num_experts + 1),
            "2 T E + 28 T top_k + 8 (E + 1) bytes",
            lambda: ops.route_and_sort(inputs.logits, inputs.top_k, renormalise=True)[0],
            {"torch softmax, topk": lambda: inputs.route().weights},
        )

    return prepare


def _combine(ops: Operations, model: ModelShape, num_tokens: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = ExpertInputs(model, num_tokens, device)
        rows = random(inputs.num_pairs, model.hidden_size, device=device)
        layout = ops.sort_tokens_by_expert(inputs.routed.expert_ids, inputs.num_experts)
        return Workload(
            2 * (rows.numel() + inputs.x.numel()) + 12 * inputs.num_pairs,
            "2 (T top_k H + T H) + 12 T top_k bytes",
            lambda: ops.combine_experts(rows, layout, inputs.routed.weights),
            {"torch scatter, bmm": lambda: inputs.combine(rows)},
        )

    return prepare


def _add_experts(ops: Operations, model: ModelShape, num_tokens: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = ExpertInputs(model, num_tokens, device)
        rows, residual = (random(n, model.hidden_size, device=device) for n in (inputs.num_pairs, num_tokens))
        weight = random(model.hidden_size, device=device)
        original = residual.clone()
        layout = ops.sort_tokens_by_expert(inputs.routed.expert_ids, inputs.num_experts)
        outputs = ExpertOutputs(rows, layout, inputs.routed.weights)
        return Workload(
            2 * (rows.numel() + 3 * inputs.x.numel() + weight.numel()) + 12 * inputs.num_pairs,
            "2 (T top_k H + 3 T H + H) + 12 T top_k bytes: residual read and written, result written",
            lambda: ops.add_experts_rms_norm(outputs, residual, weight, EPS),
            {"two launches": lambda: ops.fused_add_rms_norm(ops.combine_experts(*outputs), residual, weight, EPS)},
            restore=lambda: copy_back(residual, original),
        )

    return prepare
