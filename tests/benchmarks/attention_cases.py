"""Attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)
from torch.nn.attention.varlen import varlen_attn

from kernels.attention_types import AttentionState
from kernels.interface import Operations
from tests.benchmarks.attention_inputs import AttentionInputs
from tests.benchmarks.case import Case, Prepare, Workload
from tests.benchmarks.elementwise_cases import ELEMENTWISE_GOAL_PERCENT
from tests.benchmarks.model_shape import ModelShape, distinct
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.tensors import random

DECODE_GOAL_PERCENT = 80.0
PREFILL_GOAL_PERCENT = 60.0


def attention_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Decode of one request, of a batch, of a ragged batch; prefill of a fresh prompt, of several, of a chunk."""
    rows, context, chunk = sizes.few_tokens, sizes.context_tokens, sizes.chunk_tokens
    ragged = tuple(max(context * (row + 1) // rows, 1) for row in range(rows))
    for names, model in distinct(models, lambda m: (m.num_heads, m.num_kv_heads, m.head_dim)):
        heads = f"{model.num_heads}/{model.num_kv_heads} x {model.head_dim}"
        decodes = {
            f"1 x {context}": ((context,), None),
            f"{rows} x {context // 4}": ((context // 4,) * rows, None),
            f"{rows} x {context}": ((context,) * rows, DECODE_GOAL_PERCENT),
            f"{rows} x {ragged[0]} to {context}": (ragged, None),
        }
        for shape, (kv_lens, goal) in decodes.items():
            prepare = _decode(ops, model, kv_lens)
            yield Case("paged_decode_attention", names, f"{shape}, {heads}", "bandwidth", prepare, goal)
        prefills = {
            f"1 x {context}": ((context,), (context,), PREFILL_GOAL_PERCENT),
            f"4 x {context // 4}": ((context // 4,) * 4, (context // 4,) * 4, None),
            f"last {chunk} of {context}": ((chunk,), (context,), None),
            f"last {chunk} of {context} with {rows} decode rows": (
                (1,) * rows + (chunk,),
                (*ragged, context),
                None,
            ),
        }
        for shape, (query_lens, kv_lens, goal) in prefills.items():
            prepare = _prefill(ops, model, query_lens, kv_lens)
            yield Case("paged_prefill_attention", names, f"{shape}, {heads}", "matmul", prepare, goal)
        for num_tokens, goal in ((rows, None), (sizes.many_tokens, ELEMENTWISE_GOAL_PERCENT)):
            prepare, shape = _merge(ops, model, num_tokens), f"T {num_tokens}, {model.num_heads} x {model.head_dim}"
            yield Case("merge_attention_states", names, shape, "bandwidth", prepare, goal)


def _decode(ops: Operations, model: ModelShape, kv_lens: tuple[int, ...]) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = AttentionInputs(model, (1,) * len(kv_lens), kv_lens, device)
        kv_bytes = 2 * 2 * sum(kv_lens) * model.num_kv_heads * model.head_dim
        query_bytes = 2 * 2 * inputs.q.numel() + 4 * len(kv_lens) * model.num_heads
        libraries = {"flash varlen": lambda: _varlen(inputs)}
        if len(set(kv_lens)) == 1:
            libraries["SDPA"] = _sdpa(inputs, is_causal=False)
        return Workload(
            kv_bytes + query_bytes,
            "2 x 2 S Hkv D bytes of keys and values (S: sum of lengths) + 2 x 2 N Hq D + 4 N Hq of queries and results",
            lambda: ops.paged_decode_attention(inputs.q, inputs.k, inputs.v, inputs.rows, inputs.scale).output,
            libraries,
        )

    return prepare


def _prefill(ops: Operations, model: ModelShape, query_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = AttentionInputs(model, query_lens, kv_lens, device)
        seen = sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in zip(query_lens, kv_lens, strict=True))
        libraries = {"flash varlen": lambda: _varlen(inputs)}
        if query_lens == kv_lens and len(set(kv_lens)) == 1:
            libraries["SDPA"] = _sdpa(inputs, is_causal=True)
        return Workload(
            4 * seen * model.num_heads * model.head_dim,
            "4 P Hq D FLOP, P: pairs of a query and a key that it sees",
            lambda: ops.paged_prefill_attention(inputs.q, inputs.k, inputs.v, inputs.rows, inputs.scale).output,
            libraries,
        )

    return prepare


def _varlen(inputs: AttentionInputs) -> torch.Tensor:
    out = varlen_attn(
        inputs.q,
        *inputs.contiguous,
        inputs.rows.cu_seqlens_q,
        inputs.cu_seqlens_k,
        max(inputs.rows.query_lens),
        max(inputs.rows.kv_lens),
        scale=inputs.scale,
        window_size=(-1, 0),  # causal, the last query sees the last key
        enable_gqa=True,
    )
    return out[0] if isinstance(out, tuple) else out


def _sdpa(inputs: AttentionInputs, *, is_causal: bool) -> Callable[[], torch.Tensor]:
    """Rows of one length, keys and values contiguous."""
    num_rows = len(inputs.rows.kv_lens)
    q, k, v = (x.view(num_rows, -1, *x.shape[1:]).transpose(1, 2) for x in (inputs.q, *inputs.contiguous))

    def run() -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=inputs.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def _merge(ops: Operations, model: ModelShape, num_tokens: int) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        first, second = (
            AttentionState(
                random(num_tokens, model.num_heads, model.head_dim, device=device),
                random(num_tokens, model.num_heads, device=device, dtype=torch.float32),
            )
            for _ in range(2)
        )

        def by_torch() -> torch.Tensor:
            share = torch.sigmoid(first.lse - second.lse)[..., None]
            return torch.lerp(second.output.float(), first.output.float(), share).to(first.output.dtype)

        return Workload(
            3 * (2 * first.output.numel() + 4 * first.lse.numel()),
            "3 (2 T Hq D + 4 T Hq) bytes",
            lambda: ops.merge_attention_states(first, second).output,
            {"torch sigmoid, lerp": by_torch},
        )

    return prepare
