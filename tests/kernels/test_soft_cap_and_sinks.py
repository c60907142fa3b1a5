"""Attention whose scores are capped, or whose heads have a sink, in every implementation on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kernels import cpu, deterministic, reference
from kernels.native.operations import NativeOperations, native_operations
from kernels.operands import AttentionRows
from tests.support.tensors import PagedCache, assert_close, make_paged_cache, native_variants, with_scores, with_window

CHUNKS = [(1, 133), (5, 18), (37, 37), (1, 1), (16, 48), (70, 300), (1, 17)]
DECODE = [(1, kv_len) for kv_len in (133, 1, 16, 17, 700, 64)]
SCALE = 0.25  # scores of random heads of 64 are 2 on average
CAP = 2.0
RULES = [(CAP, False), (None, True), (CAP, True)]
NATIVE = [name for name in native_variants() if name.startswith(("avx512", "amx"))]


@pytest.fixture(params=["cpu", "deterministic", *NATIVE])
def ops(request: pytest.FixtureRequest) -> ModuleType | NativeOperations:
    named = {"cpu": cpu, "deterministic": deterministic}
    return named.get(request.param) or native_operations(request.param)


def make_case(
    lens: Sequence[tuple[int, int]],
    rule: tuple[float | None, bool],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    groups: Sequence[tuple[int, int, int]] = (),
) -> PagedCache:
    options = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "prefix_groups": groups}
    return with_scores(make_paged_cache(list(lens), **options, dtype=dtype), *rule)  # type: ignore[arg-type]  # mixed options


def arguments(case: PagedCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionRows, float]:
    return case.q, case.k_cache, case.v_cache, case.rows, SCALE


def test_the_reference_is_a_softmax_of_capped_scores_and_the_sink() -> None:
    case = make_case([(20, 23)], (CAP, True), head_dim=16)
    assert case.rows.sinks is not None
    tokens = case.rows.block_tables[0, :2].long()
    keys, values = (cache[tokens].flatten(0, 1)[:23].transpose(0, 1) for cache in (case.k_cache, case.v_cache))
    keys, values = keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)
    scores = CAP * torch.tanh(case.q.transpose(0, 1) @ keys.transpose(1, 2) * SCALE / CAP)
    scores = scores.masked_fill(torch.arange(3, 23)[:, None] < torch.arange(23), -torch.inf)
    with_sink = torch.cat((scores, case.rows.sinks[:, None, None].expand(-1, 20, 1)), dim=-1)
    expected = with_sink.softmax(-1)[..., :-1] @ values
    assert_close(reference.paged_prefill_attention(*arguments(case)), expected.transpose(0, 1))


@functools.cache
def expected_of(
    lens: tuple[tuple[int, int], ...],
    rule: tuple[float | None, bool],
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[PagedCache, torch.Tensor]:
    """A case and what the reference makes of it: once for all implementations, since it takes its time."""
    case = make_case(lens, rule, heads=heads, dtype=dtype)
    case = case if window is None else with_window(case, window)
    return case, reference.paged_prefill_attention(*arguments(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2), (17, 1)])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("rule", RULES)
def test_capped_scores_and_sinks_agree_with_the_reference(
    ops: NativeOperations,
    rule: tuple[float | None, bool],
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    for lens, attend in ((CHUNKS, ops.paged_prefill_attention), (DECODE, ops.paged_decode_attention)):
        case, expected = expected_of(tuple(lens), rule, window, heads, dtype)
        assert_close(attend(*arguments(case)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_shared_prefixes_are_capped_and_count_a_sink_once(
    ops: NativeOperations, rule: tuple[float | None, bool], dtype: torch.dtype
) -> None:
    decode = [(1, 80)] * 20 + [(1, 33)] + [(1, 900)] * 3
    chunks = [(1, 70), (20, 90), (1, 65), (9, 9), (3, 40), (1, 34)]
    for lens, groups, attend in (
        (decode, [(0, 20, 64), (21, 3, 896)], ops.paged_decode_attention),
        (chunks, [(0, 3, 64), (4, 2, 32)], ops.paged_prefill_attention),
    ):
        case = make_case(lens, rule, dtype=dtype, groups=groups)
        assert_close(attend(*arguments(case)), reference.paged_prefill_attention(*arguments(case)))


@pytest.mark.parametrize("rule", RULES)
def test_a_long_row_that_is_merged_from_parts_counts_a_sink_once(
    ops: NativeOperations, rule: tuple[float | None, bool]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case([(1, 5000), (1, 30)], rule, heads=(2, 1), head_dim=16, dtype=dtype)
        assert_close(ops.paged_decode_attention(*arguments(case)), reference.paged_decode_attention(*arguments(case)))


@pytest.mark.parametrize("value", [-1e4, 60.0, 1e4])
def test_sinks_far_from_the_scores_leave_all_or_nothing(ops: NativeOperations, value: float) -> None:
    case = make_case(CHUNKS, (None, False))
    expected = ops.paged_prefill_attention(*arguments(case)) if value < 0 else torch.zeros_like(case.q)
    rows = case.rows.scored(None, torch.full((4,), value))
    output = ops.paged_prefill_attention(case.q, case.k_cache, case.v_cache, rows, SCALE)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)


def test_a_score_near_zero_and_one_far_beyond_the_cap_keep_their_digits(ops: NativeOperations) -> None:
    # A score of 300 is off by 300 steps of float32, and a cap of 50 keeps some of them.
    for scale, steps in ((1e-3, 1), (40.0, 8)):
        case = make_case(CHUNKS, (50.0, False))
        given = (case.q, case.k_cache, case.v_cache, case.rows, scale)
        output, expected = ops.paged_prefill_attention(*given), reference.paged_prefill_attention(*given)
        assert_close(output, expected, max_steps=64.0 * steps, rms_steps=8.0 * steps)


def test_what_is_left_out_or_counted_twice_is_seen() -> None:
    case = make_case([(1, 80)] * 4, (CAP, True))
    expected = reference.paged_decode_attention(*arguments(case))
    assert case.rows.sinks is not None
    twice = case.rows.sinks + 0.6931472
    for rows in (
        replace(case.rows, soft_cap=None),
        replace(case.rows, soft_cap=CAP * 1.001),
        replace(case.rows, sinks=None),
        replace(case.rows, sinks=twice),
        replace(case.rows, sinks=case.rows.sinks.roll(1)),
    ):
        wrong = reference.paged_decode_attention(case.q, case.k_cache, case.v_cache, rows, SCALE)
        with pytest.raises(AssertionError):
            assert_close(wrong, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_capped_query_has_the_same_bits_in_every_chunk_and_in_decode(dtype: torch.dtype) -> None:
    case = make_case([(300, 300)], (CAP, True), head_dim=48, dtype=dtype)
    caches = (case.k_cache, case.v_cache)
    whole = deterministic.paged_prefill_attention(*arguments(case))
    assert whole.isfinite().all()
    for size in (7, 64, 129):
        for first in range(0, 300, size):
            last = min(first + size, 300)
            part = deterministic.paged_prefill_attention(case.q[first:last], *caches, one_row(case, first, last), SCALE)
            assert torch.equal(part, whole[first:last])
    for last in (1, 64, 129, 200, 300):
        rows = one_row(case, last - 1, last)
        alone = deterministic.paged_decode_attention(case.q[last - 1 : last], *caches, rows, SCALE)
        assert torch.equal(alone, whole[last - 1 : last])


def one_row(case: PagedCache, first: int, last: int) -> AttentionRows:
    """Queries first .. last - 1 of a case of one row as a step of their own."""
    cu_seqlens, length = torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32)
    rows = AttentionRows(case.rows.block_tables, cu_seqlens, length, (last - first,), (last,))
    return rows.scored(case.rows.soft_cap, case.rows.sinks)


def test_rows_of_every_layer_keep_their_plans_together() -> None:
    case = make_paged_cache([(1, 40)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    layers = [case.rows.scored(2.0, torch.zeros(2)) for _ in range(2)]
    assert layers[0].once(("plan",), lambda: [1]) is layers[1].once(("plan",), lambda: [2])
    assert case.rows.scored(None, None) is case.rows
    assert (case.rows.soft_cap, layers[0].soft_cap) == (None, 2.0)
