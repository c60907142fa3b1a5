"""Benchmark cases of attention over the paged cache, with and without shared prefixes, and of writing into the cache.

Rows that share a prefix are compared with the same rows attended one by one, which decides `engine.shared_prefix`.
Writing includes what comes before it: the norm of queries and keys, and the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)
from torch.nn.attention.varlen import varlen_attn

from kernels.interface import Operations
from kernels.operands import ProjectedHeads
from kernels.reference.layers import as_float8
from tests.benchmarks.kernel_inputs import (
    BLOCK_SIZE,
    EPS,
    AttentionInputs,
    Case,
    ModelShape,
    Prepare,
    Sizes,
    Workload,
    distinct,
    last_slots,
    random,
    shuffled,
)

DECODE_GOAL_PERCENT = 80.0
PREFILL_GOAL_PERCENT = 60.0

SUFFIX_QUERIES = 16  # of a prompt whose prefix is cached: 64 pairs of a block of 128 with 4 heads a KV head

FLOAT8_SCALE = 2.0**-6  # by which bfloat16 holds the numbers exactly

ROPE_BLOCK_SIZE = 16
MAX_POSITIONS = 40960


def attention_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Decode of one request, a batch and a ragged batch; prefill of one new prompt, of several, and of a chunk."""
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
            stored = _store_and_decode(ops, model, kv_lens)
            yield Case("store_and_decode", names, f"{shape}, {heads}", "bandwidth", stored)
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


def cpu_attention_cases(ops: Operations, models: Sequence[ModelShape]) -> Iterator[Case]:
    """Steps of a CPU's engine: decode, shared prefixes, prompts and chunks."""
    for names, model in distinct(models, lambda m: (m.num_heads, m.num_kv_heads, m.head_dim)):
        heads = f"{model.num_heads}/{model.num_kv_heads} x {model.head_dim}"
        for rows, context in ((64, 480), (1, 8192), (64, 96)):
            shape, prepare = f"{rows} x {context}, {heads}", _decode(ops, model, (context,) * rows)
            goal = None if context == 96 else DECODE_GOAL_PERCENT
            yield Case("paged_decode_attention", names, shape, "bandwidth", prepare, goal)
        shape, prepare = f"64 x 480, 384 shared by 16, {heads}", _shared(ops, model, (1, 64, 480), 16, 384)
        yield Case("paged_decode_attention", names, shape, "bandwidth", prepare)
        for rows, chunk, context in ((4, 448, 448), (16, 64, 448), (1, 2048, 2048)):
            shape = f"{rows} x last {chunk} of {context}, {heads}"
            prepare = _prefill(ops, model, (chunk,) * rows, (context,) * rows)
            yield Case("paged_prefill_attention", names, shape, "matmul", prepare)


def _decode(ops: Operations, model: ModelShape, kv_lens: tuple[int, ...]) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = AttentionInputs(model, (1,) * len(kv_lens), kv_lens, device)
        kv_bytes = 2 * 2 * sum(kv_lens) * model.num_kv_heads * model.head_dim
        query_bytes = 2 * 2 * inputs.q.numel()
        libraries = {"flash varlen": lambda: _varlen(inputs)}
        if len(set(kv_lens)) == 1:
            libraries["SDPA"] = _sdpa(inputs, is_causal=False)
        return Workload(
            kv_bytes + query_bytes,
            "2 x 2 S Hkv D bytes of keys and values (S: sum of lengths) + 2 x 2 N Hq D of queries and results",
            lambda: ops.paged_decode_attention(inputs.q, inputs.k, inputs.v, inputs.rows, inputs.scale),
            libraries,
        )

    return prepare


def _store_and_decode(ops: Operations, model: ModelShape, kv_lens: tuple[int, ...]) -> Prepare:
    """Each row's last key and value are written over those that the cache has."""

    def prepare(device: torch.device) -> Workload:
        inputs = AttentionInputs(model, (1,) * len(kv_lens), kv_lens, device)
        rows, (positions, slots) = inputs.rows, last_slots(inputs.rows, BLOCK_SIZE)
        qkv, weights = random(len(kv_lens), model.qkv_width, device=device), random(2, model.head_dim, device=device)
        norm = (weights[0], weights[1], EPS) if model.qk_norm else None
        angles = random(max(kv_lens), model.head_dim // 2, device=device, dtype=torch.float32)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        heads = ProjectedHeads(qkv, norm, cos_sin, positions, inputs.k, inputs.v, slots)

        def apart() -> torch.Tensor:
            q = ops.qk_norm_rope_store_kv(*heads)
            return ops.paged_decode_attention(q, inputs.k, inputs.v, rows, inputs.scale)

        kv_bytes = 2 * 2 * sum(kv_lens) * model.num_kv_heads * model.head_dim
        return Workload(
            kv_bytes + 2 * (qkv.numel() + inputs.q.numel()) + len(kv_lens) * (4 * model.head_dim + 16),
            "2 x 2 S Hkv D bytes of keys and values (S: sum of lengths) + N (2 (2 Hq + 2 Hkv) D + 4 D + 16)",
            lambda: ops.store_and_decode(heads, rows, inputs.scale),
            {"two launches": apart},
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
            lambda: ops.paged_prefill_attention(inputs.q, inputs.k, inputs.v, inputs.rows, inputs.scale),
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
    """PyTorch's own attention on contiguous keys and values; all rows must have the same length."""
    num_rows = len(inputs.rows.kv_lens)
    q, k, v = (x.view(num_rows, -1, *x.shape[1:]).transpose(1, 2) for x in (inputs.q, *inputs.contiguous))

    def run() -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=inputs.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def shared_prefix_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Decode steps, and steps of short suffixes, of which 4, 16 or all rows share seven eighths of the keys.

    Decode is also run with half and with an eighth shared, to see where it stops to pay.
    """
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
    """A step given as (queries of a row, rows, keys of a row), beside the same rows without their group."""
    query_len, num_rows, kv_len = step

    def prepare(device: torch.device) -> Workload:
        lens = ((query_len,) * num_rows, (kv_len,) * num_rows)
        inputs = AttentionInputs(model, *lens, device, group_rows, shared)
        attend = ops.paged_decode_attention if query_len == 1 else ops.paged_prefill_attention
        plain = replace(inputs.rows, prefix_groups=())
        num_keys = num_rows * (kv_len - shared) + len(inputs.rows.prefix_groups) * shared
        kv_bytes = 2 * 2 * num_keys * model.num_kv_heads * model.head_dim
        query_bytes = 2 * 2 * inputs.q.numel()
        return Workload(
            kv_bytes + query_bytes,
            "2 x 2 S Hkv D bytes of keys and values (S: different ones) + 2 x 2 T Hq D of queries and results",
            lambda: attend(inputs.q, inputs.k, inputs.v, inputs.rows, inputs.scale),
            {"row by row": lambda: attend(inputs.q, inputs.k, inputs.v, plain, inputs.scale)},
        )

    return prepare


def float8_cache_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """Decode and a chunk over keys and values in float8, beside the same numbers in bfloat16."""
    rows, context, chunk = sizes.few_tokens, sizes.context_tokens, sizes.chunk_tokens
    for names, model in distinct(models, lambda m: (m.num_heads, m.num_kv_heads, m.head_dim)):
        heads = f"{model.num_heads}/{model.num_kv_heads} x {model.head_dim}, float8"
        for kv_len in (context, context // 4):
            prepare = _float8_cache(ops, model, (1,) * rows, (kv_len,) * rows)
            yield Case("paged_decode_attention", names, f"{rows} x {kv_len}, {heads}", "bandwidth", prepare)
        prepare = _float8_cache(ops, model, (chunk,), (context,))
        yield Case("paged_prefill_attention", names, f"last {chunk} of {context}, {heads}", "matmul", prepare)


def _float8_cache(ops: Operations, model: ModelShape, query_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        inputs = AttentionInputs(model, query_lens, kv_lens, device)
        scales = torch.full((2, model.num_kv_heads), FLOAT8_SCALE, device=device)
        keys, values = (as_float8(cache, scales[0, :, None]) for cache in (inputs.k, inputs.v))
        for cache, rounded in ((inputs.k, keys), (inputs.v, values)):
            cache.copy_(rounded.float() * FLOAT8_SCALE)
        is_decode, rows = max(query_lens) == 1, inputs.rows.scaled(scales)
        attend = ops.paged_decode_attention if is_decode else ops.paged_prefill_attention
        kv_bytes = 2 * sum(kv_lens) * model.num_kv_heads * model.head_dim
        pairs = sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in zip(query_lens, kv_lens, strict=True))
        return Workload(
            kv_bytes + 4 * inputs.q.numel() if is_decode else 4 * pairs * model.num_heads * model.head_dim,
            "bandwidth: 2 S Hkv D bytes of keys and values in float8 + 4 N Hq D; matmul: 4 P Hq D FLOP",
            lambda: attend(inputs.q, keys, values, rows, inputs.scale),
            {"bfloat16 cache": lambda: attend(inputs.q, inputs.k, inputs.v, inputs.rows, inputs.scale)},
        )

    return prepare


def rope_cases(ops: Operations, models: Sequence[ModelShape], sizes: Sizes) -> Iterator[Case]:
    """A decode step's and a prefill step's tokens, written to slots in random order."""
    for num_tokens, goal in ((sizes.few_tokens, None), (sizes.many_tokens, sizes.pass_goal_percent)):
        for names, model in distinct(models, lambda m: (m.num_heads, m.num_kv_heads, m.head_dim, m.qk_norm)):
            norm = "norm" if model.qk_norm else "no norm"
            shape = f"T {num_tokens}, {model.num_heads}/{model.num_kv_heads} x {model.head_dim}, {norm}"
            yield Case("qk_norm_rope_store_kv", names, shape, "bandwidth", _rope(ops, num_tokens, model), goal)


def _rope(ops: Operations, num_tokens: int, model: ModelShape) -> Prepare:
    def prepare(device: torch.device) -> Workload:
        qkv = random(num_tokens, model.qkv_width, device=device)
        weights = random(2, model.head_dim, device=device)
        norm = (weights[0], weights[1], EPS) if model.qk_norm else None
        cos_sin = random(MAX_POSITIONS, model.head_dim, device=device, dtype=torch.float32)
        positions = shuffled(MAX_POSITIONS, device)[:num_tokens]
        num_blocks = -(-num_tokens // ROPE_BLOCK_SIZE) + 1
        caches = torch.zeros(
            2, num_blocks, ROPE_BLOCK_SIZE, model.num_kv_heads, model.head_dim, dtype=qkv.dtype, device=device
        )
        slots = shuffled(num_blocks * ROPE_BLOCK_SIZE, device)[:num_tokens]
        return Workload(
            # Read and written: each head once. Read besides: cosines and sines in float32, position and slot.
            num_tokens * (2 * 2 * model.qkv_width + 4 * model.head_dim + 16),
            "T (2 x 2 (Hq + 2 Hkv) D + 4 D + 16) bytes",
            lambda: ops.qk_norm_rope_store_kv(qkv, norm, cos_sin, positions, caches[0], caches[1], slots),
            {"torch rms_norm, rotation, index_copy_": lambda: _by_torch(qkv, norm, cos_sin[positions], caches, slots)},
        )

    return prepare


def _by_torch(
    qkv: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    rotation: torch.Tensor,
    caches: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    num_kv_heads, head_dim = caches.shape[-2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    queries, keys, values = torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), dim=1)
    if norm is not None:
        queries = F.rms_norm(queries, (head_dim,), norm[0], norm[2])
        keys = F.rms_norm(keys, (head_dim,), norm[1], norm[2])
    cos, sin = rotation[:, None].chunk(2, dim=-1)
    caches[0].flatten(0, 1).index_copy_(0, slots, _rotate(keys, cos, sin))
    caches[1].flatten(0, 1).index_copy_(0, slots, values)
    return _rotate(queries, cos, sin)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
