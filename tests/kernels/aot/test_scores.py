"""Capped scores, sinks and other activations as compiled for sm_80 and sm_90: no spills, memory for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernels.operands import AttentionRows, PrefixGroup, ProjectedHeads
from kernels.triton.decode_attention import paged_decode_attention, store_and_decode
from kernels.triton.dense import clamped_swiglu, gelu_and_mul
from kernels.triton.prefill_attention import paged_prefill_attention
from tests.kernels.aot.table import SM_80, SM_89, SM_90
from tests.support.compiled_kernels import SHARED_MEMORY_LIMIT_BYTES, CompiledKernel, compiled_kernels, compiling_for

BLOCK_SIZE = 16
SPLIT, UNSPLIT = [(1, 4096)], [(1, 4096)] * 264  # rows alone fill 132 multiprocessors
CHUNKS = [(512, 4096), (100, 100), (1, 700)]
# Query heads, KV heads and head_dim of gpt-oss, of Gemma 2 9B and 27B and Gemma 3 4B.
SINKS, CAPS = [(64, 8, 64)], [(16, 8, 256), (32, 16, 128), (8, 4, 256)]
OTHER_SHARED_MEMORY_LIMIT_BYTES = 101_376  # sm_86, sm_89 and sm_120 take sm_80's launches

pytestmark = pytest.mark.timeout(900)


def rows_of(lens: Sequence[tuple[int, int]], **options: Any) -> AttentionRows:
    """Tensors that nobody reads or writes."""
    return AttentionRows(
        torch.empty(len(lens), 256, dtype=torch.int32),
        torch.empty(len(lens) + 1, dtype=torch.int32),
        torch.empty(len(lens), dtype=torch.int32),
        tuple(query_len for query_len, _ in lens),
        tuple(kv_len for _, kv_len in lens),
        **options,
    )


def attend(heads: tuple[int, int, int], dtype: torch.dtype, **scores: Any) -> None:
    """Decode, split and not, alone and with its keys stored; chunks; and rows that share a prefix, few and many. With
    scales the cache is in float8.
    """
    num_heads, num_kv_heads, head_dim = heads
    cache_dtype = torch.float8_e4m3fn if "kv_scales" in scores else dtype
    cache = torch.empty(8, BLOCK_SIZE, num_kv_heads, head_dim, dtype=cache_dtype)
    caches = (cache, torch.empty_like(cache))
    for lens in (SPLIT, UNSPLIT):
        rows, ids = rows_of(lens, **scores), torch.empty(len(lens), dtype=torch.int64)
        paged_decode_attention(torch.empty(len(lens), num_heads, head_dim, dtype=dtype), *caches, rows, 0.125)
        qkv = torch.empty(len(lens), (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        heads_of_step = ProjectedHeads(qkv, None, torch.empty(4096, head_dim), ids, *caches, ids, rows.kv_scales)
        store_and_decode(heads_of_step, rows, 0.125)
    paged_prefill_attention(torch.empty(613, num_heads, head_dim, dtype=dtype), *caches, rows_of(CHUNKS, **scores), 0.1)
    if scores.get("window"):
        return
    for num_members in (2, 8, 50):
        groups = (PrefixGroup(0, num_members, 1024),)
        rows = rows_of([(1, 1123)] * (num_members + 1), prefix_groups=groups, **scores)
        q = torch.empty(rows.num_rows, num_heads, head_dim, dtype=dtype)
        paged_decode_attention(q, *caches, rows, 0.125)
        paged_prefill_attention(q, *caches, rows, 0.125)


def check(kernels: Sequence[CompiledKernel], capability: int) -> None:
    for kernel in kernels:
        assert kernel.spill_bytes == 0, kernel
        limit = SHARED_MEMORY_LIMIT_BYTES[90] if capability == 90 else OTHER_SHARED_MEMORY_LIMIT_BYTES
        assert kernel.shared_bytes <= limit, kernel


@pytest.mark.parametrize("capability", [SM_80, SM_90])
def test_capped_scores_fit(capability: int) -> None:
    with compiling_for(capability) as kernels:
        for heads in CAPS:
            attend(heads, torch.bfloat16, soft_cap=50.0)
        attend(CAPS[0], torch.bfloat16, soft_cap=50.0, window=4096)
        gelu_and_mul(torch.empty(1, 2 * 9216, dtype=torch.bfloat16))
    check(kernels, capability)
    assert {kernel.constants["SOFT_CAP"] for kernel in kernels if "TILE" in kernel.constants} == {50.0}
    assert [kernel.constants["IS_GELU"] for kernel in kernels if kernel.name == "silu_and_mul_kernel"] == [True]


def launch_beside_float8() -> None:
    for heads in CAPS[:2]:
        attend(heads, torch.bfloat16, soft_cap=50.0, kv_scales=torch.empty(2, heads[1]))
    (heads,) = SINKS
    attend(heads, torch.bfloat16, sinks=torch.empty(heads[0]), kv_scales=torch.empty(2, heads[1]), window=128)


@pytest.mark.parametrize("capability", [SM_89, SM_90])
def test_caps_and_sinks_fit_beside_a_cache_in_float8(capability: int) -> None:
    kernels = compiled_kernels(capability, [launch_beside_float8])
    check(kernels, capability)
    assert {kernel.constants.get("KV_CACHE") for kernel in kernels if "TILE" in kernel.constants} == {"e4m3"}


@pytest.mark.parametrize("capability", [SM_80, SM_90])
def test_sinks_fit(capability: int) -> None:
    with compiling_for(capability) as kernels:
        for heads in SINKS:
            for options in ({}, {"window": 128}):
                attend(heads, torch.bfloat16, sinks=torch.empty(heads[0]), **options)
        clamped_swiglu(torch.empty(4, 2 * 2880, dtype=torch.bfloat16), 1.702, 7.0)
    check(kernels, capability)
    assert {kernel.name for kernel in kernels} >= {
        "silu_and_mul_kernel",
        "_decode_kernel",
        "_prefill_kernel",
    }
