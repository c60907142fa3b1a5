"""Projections, norms and the gated activation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from kernels.interface import Operations
from tests.benchmarks.case import Case, Prepare, Workload
from tests.benchmarks.model_shape import ModelShape, distinct
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.tensors import random

EPS = 1e-6
ELEMENTWISE_GOAL_PERCENT = 85.0


def elementwise_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """A decode step's tokens and a prefill step's; the goal is for the latter, since few rows do not fill a GPU."""
    yield from _linear_cases(ops, models, sizes)
    for num_tokens, goal in ((sizes.few_tokens, None), (sizes.many_tokens, ELEMENTWISE_GOAL_PERCENT)):
        for names, model in distinct(models, lambda m: m.hidden_size):
            shape, hidden = f"T {num_tokens}, H {model.hidden_size}", model.hidden_size
            yield Case("rms_norm", names, shape, "bandwidth", _rms_norm(ops, num_tokens, hidden), goal)
            yield Case("fused_add_rms_norm", names, shape, "bandwidth", _add_norm(ops, num_tokens, hidden), goal)
        for names, model in distinct(models, lambda m: (m.intermediate_size, m.experts_per_token)):
            rows = num_tokens * max(model.experts_per_token, 1)
            shape, prepare = f"rows {rows}, I {model.intermediate_size}", _silu(ops, rows, model.intermediate_size)
            yield Case("silu_and_mul", names, shape, "bandwidth", prepare, goal)


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


def _linear(ops: Operations, num_tokens: int, k: int, n: int, *, by_bytes: bool) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        x, weight = random(num_tokens, k, device=device), ops.pack(random(n, k, device=device))
        amount = 2 * (n * k + num_tokens * (k + n)) if by_bytes else 2 * num_tokens * n * k
        formula = "bandwidth: 2 (N K + T K + T N) bytes; matmul: 2 T N K FLOP; it is a library call itself (cuBLASLt)"
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
            restore=lambda: _copy(residual, original),
        )

    return prepare


def _silu(ops: Operations, num_rows: int, width: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        gate_up = random(num_rows, 2 * width, device=device)

        def by_torch() -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)

        amount = 2 * 3 * num_rows * width
        return Workload(amount, "2 x 3 rows I bytes", lambda: ops.silu_and_mul(gate_up), {"torch silu, mul_": by_torch})

    return prepare


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
