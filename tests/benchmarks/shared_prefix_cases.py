"""Attention of rows that share a prefix, against the same rows attended one by one: decides `engine.shared_prefix`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kernels.interface import Operations
from tests.benchmarks.attention_inputs import BLOCK_SIZE, AttentionInputs
from tests.benchmarks.case import Case, Prepare, Workload
from tests.benchmarks.model_shape import ModelShape, distinct
from tests.benchmarks.sizes import Sizes

SUFFIX_QUERIES = 16  # of a prompt whose prefix is cached: 64 pairs of a block of 128 with 4 heads a KV head


def shared_prefix_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """A decode step and a step of short suffixes, seven eighths of the keys shared by 4, 16 and all rows; decode with
    half as much, and with an eighth, to see where it stops to pay."""
    num_rows, context = sizes.few_tokens, sizes.context_tokens
    shares = [(group_rows, 7) for group_rows in (4, 16, num_rows)] + [(16, 4), (16, 1), (2, 7)]
    for names, model in distinct(models, lambda m: (m.num_heads, m.num_kv_heads, m.head_dim)):
        heads = f"{model.num_heads}/{model.num_kv_heads} x {model.head_dim}"
        for group_rows, eighths in shares:
            group = min(group_rows, num_rows)
            shared = context * eighths // 8 // BLOCK_SIZE * BLOCK_SIZE or BLOCK_SIZE
            shape = f"{num_rows} x {context}, {shared} shared by {group}, {heads}"
            prepare = _shared(ops, model, (1, num_rows, context), group, shared)
            yield Case("paged_decode_attention", names, shape, "bandwidth", prepare)
            if eighths == 7:
                queries = min(SUFFIX_QUERIES, context - shared)
                shape = f"{num_rows} x last {queries} of {context}, {shared} shared by {group}, {heads}"
                prepare = _shared(ops, model, (queries, num_rows, context), group, shared)
                yield Case("paged_prefill_attention", names, shape, "bandwidth", prepare)


def _shared(ops: Operations, model: ModelShape, step: tuple[int, int, int], group_rows: int, shared: int) -> Prepare:
    """step: queries of a row, rows, keys of a row."""
    query_len, num_rows, kv_len = step

    def prepare(device: torch.device) -> Workload:
        lens = ((query_len,) * num_rows, (kv_len,) * num_rows)
        inputs = AttentionInputs(model, *lens, device, group_rows, shared)
        attend = ops.paged_decode_attention if query_len == 1 else ops.paged_prefill_attention
        plain = replace(inputs.rows, prefix_groups=())
        num_keys = num_rows * (kv_len - shared) + len(inputs.rows.prefix_groups) * shared
        kv_bytes = 2 * 2 * num_keys * model.num_kv_heads * model.head_dim
        query_bytes = 2 * 2 * inputs.q.numel() + 4 * inputs.q.shape[0] * model.num_heads
        return Workload(
            kv_bytes + query_bytes,
            "2 x 2 S Hkv D bytes of keys and values (S: different ones) + 2 x 2 T Hq D + 4 T Hq of queries and results",
            lambda: attend(inputs.q, inputs.k, inputs.v, inputs.rows, inputs.scale).output,
            {"row by row": lambda: attend(inputs.q, inputs.k, inputs.v, plain, inputs.scale).output},
        )

    return prepare
