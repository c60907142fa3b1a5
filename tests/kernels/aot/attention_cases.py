"""Every launch of the attention operations at the shapes of four models, and at the head sizes none of them has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.attention_types import AttentionRows, AttentionState, PrefixGroup
from kernels.triton.decode_attention import paged_decode_attention
from kernels.triton.partial_attention import merge_attention_states
from kernels.triton.prefill_attention import paged_prefill_attention

BLOCK_SIZE = 16


@dataclass(frozen=True)
class _Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128


_MODELS = {
    "Qwen3-0.6B": _Heads(16, 8),
    "Qwen3-8B": _Heads(32, 8),
    "Qwen3-30B-A3B": _Heads(32, 4),
    "Llama-3-8B": _Heads(32, 8),
}
# Among them one head a KV head and 16, and groups that are no powers of two.
_OTHERS = (_Heads(16, 1), _Heads(14, 2, 64), _Heads(5, 1, 80), _Heads(8, 8, 96), _Heads(14, 2, 256))
_SPLIT = [(1, 4096)]  # one row does not
_UNSPLIT = [(1, 4096)] * 264  # rows alone fill 132 multiprocessors
_CHUNKS = [(512, 4096), (100, 100), (1, 700)]
# (query, head of the group) pairs of a group that the kernel over shared keys takes in blocks of 16, of 64 and of 128.
_NUM_SHARED_PAIRS = (16, 64, 400)
_SHARED_TOKENS = 1024
# Every head size but 96, and the largest, which is the first to spill, in the largest blocks: a kernel over shared keys
# takes 3 to 5 s to compile, for each of two architectures.
_SHARING = (
    *((_MODELS["Qwen3-8B"], num_pairs) for num_pairs in _NUM_SHARED_PAIRS),
    (_MODELS["Qwen3-30B-A3B"], 64),
    (_Heads(14, 2, 64), 64),
    (_Heads(5, 1, 80), 16),
    (_Heads(14, 2, 256), 400),
)


def run_cases() -> None:
    """Call the operations with tensors that nobody reads or writes."""
    for heads in (*_MODELS.values(), *_OTHERS):
        _run(heads, torch.bfloat16, decode=(_SPLIT, _UNSPLIT), prefill=(_CHUNKS,))
    for heads, num_pairs in _SHARING:
        _run_shared(heads, torch.bfloat16, num_pairs)


def run_float32_cases() -> None:
    """One shape in float32, in which no model of that size is run."""
    _run(_MODELS["Qwen3-8B"], torch.float32, decode=(_SPLIT, _UNSPLIT), prefill=(_CHUNKS,))
    for num_pairs in _NUM_SHARED_PAIRS:
        _run_shared(_MODELS["Qwen3-8B"], torch.float32, num_pairs)


def run_two_steps() -> None:
    """Two steps of one model that differ in every number, and in where the rows' tensors start."""
    _run(_MODELS["Qwen3-8B"], torch.bfloat16, decode=(_UNSPLIT,), prefill=(_CHUNKS,))
    _run(_MODELS["Qwen3-8B"], torch.bfloat16, decode=([(1, 999)] * 77,), prefill=([(33, 77), (1, 5)],), first_row=1)
    _run_shared(_MODELS["Qwen3-8B"], torch.bfloat16, 400)
    _run_shared(_MODELS["Qwen3-8B"], torch.bfloat16, 332, num_tokens=77 * BLOCK_SIZE, first_row=1)


def _run(
    heads: _Heads,
    dtype: torch.dtype,
    *,
    decode: tuple[list[tuple[int, int]], ...],
    prefill: tuple[list[tuple[int, int]], ...],
    first_row: int = 0,
) -> None:
    k_cache, v_cache = (torch.empty(8, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, dtype=dtype) for _ in range(2))
    for operation, steps in ((paged_decode_attention, decode), (paged_prefill_attention, prefill)):
        for lens in steps:
            rows = _rows(lens, first_row)
            q = torch.empty(rows.num_queries, heads.num_heads, heads.head_dim, dtype=dtype)
            state = operation(q, k_cache, v_cache, rows, heads.head_dim**-0.5)
            merge_attention_states(state, AttentionState(*(torch.empty_like(tensor) for tensor in state)))


def _run_shared(
    heads: _Heads, dtype: torch.dtype, num_pairs: int, *, num_tokens: int = _SHARED_TOKENS, first_row: int = 0
) -> None:
    """Rows of one query of which the first share their first num_tokens keys, all but one of them."""
    k_cache, v_cache = (torch.empty(8, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, dtype=dtype) for _ in range(2))
    num_members = max(num_pairs * heads.num_kv_heads // heads.num_heads, 2)
    rows = _rows([(1, num_tokens + 99)] * (num_members + 1), first_row)
    q = torch.empty(rows.num_queries, heads.num_heads, heads.head_dim, dtype=dtype)
    for operation in (paged_decode_attention, paged_prefill_attention):
        shared = replace(rows, prefix_groups=(PrefixGroup(0, num_members, num_tokens),))
        operation(q, k_cache, v_cache, shared, heads.head_dim**-0.5)


def _rows(lens: list[tuple[int, int]], first_row: int) -> AttentionRows:
    """first_row: of this many rows before these the tensors have a place, too."""
    num_rows, max_blocks = len(lens), max(-(-kv_len // BLOCK_SIZE) for _, kv_len in lens)
    return AttentionRows(
        block_tables=torch.empty(num_rows + first_row, max_blocks, dtype=torch.int32)[first_row:],
        cu_seqlens_q=torch.empty(num_rows + first_row + 1, dtype=torch.int32)[first_row:],
        seq_lens=torch.empty(num_rows + first_row, dtype=torch.int32)[first_row:],
        query_lens=tuple(query_len for query_len, _ in lens),
        kv_lens=tuple(kv_len for _, kv_len in lens),
    )
