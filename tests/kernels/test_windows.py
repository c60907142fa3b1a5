"""Attention whose queries see the last keys alone, in every implementation on a CPU, over blocks that are no more."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import cpu, deterministic, reference
from kernels.native.operations import NativeOperations, native_operations
from kernels.operands import AttentionRows
from tests.support.tensors import PagedCache, assert_close, make_paged_cache, native_variants, with_window

CHUNKS = [(1, 133), (5, 18), (37, 37), (1, 1), (16, 48), (2, 2), (1, 16), (70, 300), (3, 20), (1, 17), (130, 130)]
DECODE = [(1, kv_len) for kv_len in (133, 1, 16, 17, 48, 131, 15, 700, 64)]
WINDOWS = [1, 5, 16, 33, 128, 200, 1000]
HEADS = [(4, 2), (7, 1), (34, 2)]
Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionRows, float]
NATIVE = [name for name in native_variants() if name.startswith(("avx512", "amx"))]


@pytest.fixture(params=["cpu", "deterministic", *NATIVE])
def ops(request: pytest.FixtureRequest) -> ModuleType | NativeOperations:
    named = {"cpu": cpu, "deterministic": deterministic}
    return named.get(request.param) or native_operations(request.param)


def arguments_of(case: PagedCache) -> Arguments:
    return case.q, case.k_cache, case.v_cache, case.rows, 0.125


@pytest.mark.parametrize("window", [1, 5, 16, 23])
def test_the_reference_agrees_with_pytorch_under_a_mask(window: int) -> None:
    case = make_paged_cache([(20, 23)], num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    tokens = case.rows.block_tables[0, :2].long()
    keys, values = (cache[tokens].flatten(0, 1)[:23].transpose(0, 1) for cache in (case.k_cache, case.v_cache))
    num_behind = torch.arange(3, 23)[:, None] - torch.arange(23)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q.transpose(0, 1), keys, values, (num_behind >= 0) & (num_behind < window), scale=0.3, enable_gqa=True
    )
    case = with_window(case, window)
    output = reference.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.3)
    assert_close(output, expected.transpose(0, 1))


@pytest.fixture(scope="module", params=product(WINDOWS, HEADS, [torch.float32, torch.bfloat16]), ids=str)
def windowed(request: pytest.FixtureRequest) -> list[tuple[PagedCache, torch.Tensor]]:
    """A step of chunks and one of decode, and what the reference makes of each."""
    window, (num_heads, num_kv_heads), dtype = request.param
    options: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 64, "dtype": dtype}
    cases = [with_window(make_paged_cache(lens, **options), window) for lens in (CHUNKS, DECODE)]
    return [(case, reference.paged_prefill_attention(*arguments_of(case))) for case in cases]


def test_windows_agree_with_the_reference(
    ops: NativeOperations, windowed: list[tuple[PagedCache, torch.Tensor]]
) -> None:
    for (case, expected), attend in zip(
        windowed, (ops.paged_prefill_attention, ops.paged_decode_attention), strict=True
    ):
        assert_close(attend(*arguments_of(case)), expected)


@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_every_block_size_agrees_with_the_reference(ops: NativeOperations, block_size: int) -> None:
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 40, "block_size": block_size}
    for lens, attend in ((CHUNKS, ops.paged_prefill_attention), (DECODE, ops.paged_decode_attention)):
        case = with_window(make_paged_cache(lens, **options, dtype=torch.float32), 50)  # type: ignore[arg-type]  # mixed options
        arguments = (case.q, case.k_cache, case.v_cache, case.rows, 0.2)
        assert_close(attend(*arguments), reference.paged_prefill_attention(*arguments))


def test_a_long_row_is_merged_from_parts_and_segments(ops: NativeOperations) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = make_paged_cache([(1, 9000), (1, 30)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=dtype)
        case = with_window(case, 4111)
        arguments = (case.q, case.k_cache, case.v_cache, case.rows, 0.35)
        assert_close(ops.paged_decode_attention(*arguments), reference.paged_decode_attention(*arguments))


def test_a_window_of_the_longest_row_and_more_changes_nothing(ops: NativeOperations) -> None:
    case = make_paged_cache(CHUNKS, num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    expected = ops.paged_prefill_attention(*arguments_of(case))
    case = replace(case, rows=case.rows.windowed(300))
    assert_close(ops.paged_prefill_attention(*arguments_of(case)), expected)


def one_row(case: PagedCache, first: int, last: int, window: int) -> AttentionRows:
    """Queries first .. last - 1 of a case of one row as a step of their own."""
    cu_seqlens, length = torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32)
    tables = case.rows.block_tables
    return AttentionRows(tables, cu_seqlens, length, (last - first,), (last,), window=window)


@pytest.mark.parametrize("window", [3, 64, 128, 150, 290])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_has_the_same_bits_in_every_chunk_and_in_decode(window: int, dtype: torch.dtype) -> None:
    case = make_paged_cache([(300, 300)], num_heads=4, num_kv_heads=2, head_dim=48, dtype=dtype)
    caches = (case.k_cache, case.v_cache)
    whole = deterministic.paged_prefill_attention(case.q, *caches, one_row(case, 0, 300, window), 0.2)
    assert whole.isfinite().all()
    for size in (7, 64, 129):
        for first in range(0, 300, size):
            last = min(first + size, 300)
            rows = one_row(case, first, last, window)
            part = deterministic.paged_prefill_attention(case.q[first:last], *caches, rows, 0.2)
            assert torch.equal(part, whole[first:last])
    for last in (1, 64, 129, 200, 300):
        rows = one_row(case, last - 1, last, window)
        alone = deterministic.paged_decode_attention(case.q[last - 1 : last], *caches, rows, 0.2)
        assert torch.equal(alone, whole[last - 1 : last])


def test_windowed_rows_are_made_once_and_are_in_no_group() -> None:
    lens, groups = [(1, 40), (1, 50)], [(0, 2, 32)]
    case = make_paged_cache(lens, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32, prefix_groups=groups)
    rows = case.rows.windowed(20)
    assert rows is case.rows.windowed(20)
    assert (rows.prefix_groups, rows.window, rows.max_seen) == ((), 20, 20)
    assert case.rows.window is None
    assert [rows.first_key(row) for row in range(2)] == [20, 30]
