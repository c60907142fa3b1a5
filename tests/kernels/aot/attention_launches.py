"""Launches the attention operations at the shapes of models, with keys and values in the model dtype and in float8."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.operands import AttentionRows, PrefixGroup, ProjectedHeads
from kernels.triton.decode_attention import paged_decode_attention, store_and_decode
from kernels.triton.partial_attention import merge_attention_states
from kernels.triton.prefill_attention import paged_prefill_attention

BLOCK_SIZE = 16

FLOAT8 = torch.float8_e4m3fn

_SPLIT = [(1, 4096)]  # one row does not
_UNSPLIT = [(1, 4096)] * 264  # rows alone fill 132 multiprocessors
_CHUNKS = [(512, 4096), (100, 100), (1, 700)]
# (query, head of the group) pairs of a group that the kernel over shared keys takes in blocks of 16, of 64 and of 128.
_NUM_SHARED_PAIRS = (16, 64, 400)
_SHARED_TOKENS = 1024


@dataclass(frozen=True)
class _Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    qk_norm: bool = True


_HEADS_OF_MODELS = {
    "Qwen3-0.6B": _Heads(16, 8),
    "Qwen3-8B": _Heads(32, 8),
    "Qwen3-30B-A3B": _Heads(32, 4),
    "Llama-3-8B": _Heads(32, 8, qk_norm=False),
}
# Among them one head a KV head and 16, and groups that are no powers of two.
_OTHER_HEADS = (_Heads(16, 1), _Heads(14, 2, 64), _Heads(5, 1, 80), _Heads(8, 8, 96), _Heads(14, 2, 256))

# Not every combination, since a kernel over shared keys takes 3 to 5 s to compile for each of two architectures: every
# head size but 96, and in the largest blocks the largest, which is the first to spill.
_SHARING = (
    *((_HEADS_OF_MODELS["Qwen3-8B"], num_pairs) for num_pairs in _NUM_SHARED_PAIRS),
    (_HEADS_OF_MODELS["Qwen3-30B-A3B"], 64),
    (_Heads(14, 2, 64), 64),
    (_Heads(5, 1, 80), 16),
    (_Heads(14, 2, 256), 400),
)


def launch_attention() -> None:
    """Call the operations with tensors that nobody reads or writes."""
    for heads in (*_HEADS_OF_MODELS.values(), *_OTHER_HEADS):
        _attend(heads, torch.bfloat16, decode=(_SPLIT, _UNSPLIT), prefill=(_CHUNKS,))
    for heads, num_pairs in _SHARING:
        _attend_to_shared_keys(heads, torch.bfloat16, num_pairs)


def launch_attention_once() -> None:
    """A step of each kind of one model."""
    heads = _HEADS_OF_MODELS["Qwen3-8B"]
    _attend(heads, torch.bfloat16, decode=(_SPLIT,), prefill=(_CHUNKS,))
    _attend_to_shared_keys(heads, torch.bfloat16, 64)


def launch_float32_attention() -> None:
    """Two shapes in float32, in which no model of that size is run: of 128 dims, and of 64, whose heads are taken as
    projected.
    """
    for heads in (_HEADS_OF_MODELS["Qwen3-8B"], _Heads(14, 2, 64)):
        _attend(heads, torch.float32, decode=(_SPLIT, _UNSPLIT), prefill=(_CHUNKS,))
    for num_pairs in _NUM_SHARED_PAIRS:
        _attend_to_shared_keys(_HEADS_OF_MODELS["Qwen3-8B"], torch.float32, num_pairs)


def launch_windows() -> None:
    """A step of chunks and two of decode with a window, split and not, for heads up to the widest."""
    for heads in (_HEADS_OF_MODELS["Qwen3-8B"], _Heads(14, 2, 64), _Heads(5, 1, 80), _Heads(14, 2, 256)):
        _attend(heads, torch.bfloat16, decode=(_SPLIT, _UNSPLIT), prefill=(_CHUNKS,), window=1024)


def launch_float8_cache() -> None:
    """A KV cache in float8 beside queries in bfloat16: steps that store and decode, in two launches, chunks, keys that
    blocks of 16, 64 and 128 queries share, and a window.
    """
    heads_8b, wide = _HEADS_OF_MODELS["Qwen3-8B"], _Heads(14, 2, 256)
    for heads in (heads_8b, _HEADS_OF_MODELS["Llama-3-8B"], *_OTHER_HEADS):
        _attend(heads, FLOAT8, decode=(_SPLIT, _UNSPLIT), prefill=(_CHUNKS,))
    for heads, num_pairs in (*_SHARING, (wide, 16)):
        _attend_to_shared_keys(heads, FLOAT8, num_pairs)
    for heads in (heads_8b, wide):
        _attend(heads, FLOAT8, decode=(_SPLIT, _UNSPLIT), prefill=(_CHUNKS,), window=1024)


def launch_two_steps() -> None:
    """Two steps of one model that differ in every number, and in where the rows' tensors start."""
    _attend(_HEADS_OF_MODELS["Qwen3-8B"], torch.bfloat16, decode=(_UNSPLIT,), prefill=(_CHUNKS,))
    _attend(
        _HEADS_OF_MODELS["Qwen3-8B"],
        torch.bfloat16,
        decode=([(1, 999)] * 77,),
        prefill=([(33, 77), (1, 5)],),
        first_row=1,
    )
    _attend_to_shared_keys(_HEADS_OF_MODELS["Qwen3-8B"], torch.bfloat16, 400)
    _attend_to_shared_keys(_HEADS_OF_MODELS["Qwen3-8B"], torch.bfloat16, 332, num_tokens=77 * BLOCK_SIZE, first_row=1)


def _attend(
    heads: _Heads,
    dtype: torch.dtype,
    *,
    decode: tuple[list[tuple[int, int]], ...],
    prefill: tuple[list[tuple[int, int]], ...],
    first_row: int = 0,
    window: int | None = None,
) -> None:
    """dtype: of keys and values; queries are in it too, beside float8 in bfloat16."""
    k_cache, v_cache = (torch.empty(8, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, dtype=dtype) for _ in range(2))
    q_dtype, kv_scales = _beside(k_cache)
    for operation, steps in ((paged_decode_attention, decode), (paged_prefill_attention, prefill)):
        for lens in steps:
            rows = replace(_attention_rows(lens, first_row), window=window, kv_scales=kv_scales)
            q = torch.empty(rows.num_queries, heads.num_heads, heads.head_dim, dtype=q_dtype)
            output = operation(q, k_cache, v_cache, rows, heads.head_dim**-0.5)
            if operation is paged_decode_attention:
                _store_and_decode(heads, k_cache, v_cache, rows)
            lse = torch.empty(output.shape[:2])
            merge_attention_states(output, lse, torch.empty_like(output), torch.empty_like(lse))


def _beside(cache: torch.Tensor) -> tuple[torch.dtype, torch.Tensor | None]:
    """The dtype of queries, and scales where the cache is in float8."""
    return (torch.bfloat16, torch.empty(2, cache.shape[2])) if cache.dtype is FLOAT8 else (cache.dtype, None)


def _store_and_decode(heads: _Heads, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows) -> None:
    (dtype, kv_scales), ids = _beside(k_cache), torch.empty(rows.num_rows, dtype=torch.int64)
    weight = torch.empty(heads.head_dim, dtype=dtype)
    qk_norm = (weight, weight, 1e-6) if heads.qk_norm else None
    qkv = torch.empty(rows.num_rows, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, dtype=dtype)
    cos_sin = torch.empty(40960, heads.head_dim)
    projected = ProjectedHeads(qkv, qk_norm, cos_sin, ids, k_cache, v_cache, ids, kv_scales)
    store_and_decode(projected, rows, heads.head_dim**-0.5)


def _attend_to_shared_keys(
    heads: _Heads, dtype: torch.dtype, num_pairs: int, *, num_tokens: int = _SHARED_TOKENS, first_row: int = 0
) -> None:
    """Rows of one query; all but the last share their first num_tokens keys."""
    k_cache, v_cache = (torch.empty(8, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, dtype=dtype) for _ in range(2))
    num_members = max(num_pairs * heads.num_kv_heads // heads.num_heads, 2)
    q_dtype, kv_scales = _beside(k_cache)
    rows = replace(_attention_rows([(1, num_tokens + 99)] * (num_members + 1), first_row), kv_scales=kv_scales)
    q = torch.empty(rows.num_queries, heads.num_heads, heads.head_dim, dtype=q_dtype)
    for operation in (paged_decode_attention, paged_prefill_attention):
        shared = replace(rows, prefix_groups=(PrefixGroup(0, num_members, num_tokens),))
        operation(q, k_cache, v_cache, shared, heads.head_dim**-0.5)


def _attention_rows(lens: list[tuple[int, int]], first_row: int) -> AttentionRows:
    """first_row: the tensors begin with so many other rows, which are cut off."""
    num_rows, max_blocks = len(lens), max(-(-kv_len // BLOCK_SIZE) for _, kv_len in lens)
    return AttentionRows(
        block_tables=torch.empty(num_rows + first_row, max_blocks, dtype=torch.int32)[first_row:],
        cu_seqlens_q=torch.empty(num_rows + first_row + 1, dtype=torch.int32)[first_row:],
        seq_lens=torch.empty(num_rows + first_row, dtype=torch.int32)[first_row:],
        query_lens=tuple(query_len for query_len, _ in lens),
        kv_lens=tuple(kv_len for _, kv_len in lens),
    )
