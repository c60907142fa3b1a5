"""Triton attention whose scores are capped, or whose heads have a sink, agrees with the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.operands import ProjectedHeads
from kernels.triton import decode_attention
from kernels.triton.attention_launch import DecodeSplits
from kernels.triton.decode_attention import paged_decode_attention, store_and_decode
from kernels.triton.prefill_attention import paged_prefill_attention
from tests.support.tensors import PagedCache, assert_close, make_paged_cache, with_scores, with_window

CHUNKS = [(1, 133), (5, 18), (37, 37), (1, 1), (3, 70)]
DECODE = [(1, kv_len) for kv_len in (133, 1, 17, 0, 64)]
SCALE = 0.25
RULES = [(2.0, False), (None, True), (2.0, True)]
Rule = tuple[float | None, bool]


def make_case(lens: Sequence[tuple[int, int]], rule: Rule, dtype: torch.dtype, **options: object) -> PagedCache:
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64} | options
    return with_scores(make_paged_cache(list(lens), **shape, dtype=dtype), *rule)  # type: ignore[arg-type]  # mixed options


def to_device(case: PagedCache, device: torch.device) -> PagedCache:
    names = ("block_tables", "cu_seqlens_q", "seq_lens", *(("sinks",) if case.rows.sinks is not None else ()))
    rows = replace(case.rows, **{name: getattr(case.rows, name).to(device) for name in names})
    q, k_cache, v_cache = (tensor.to(device) for tensor in (case.q, case.k_cache, case.v_cache))
    return PagedCache(q=q, k_cache=k_cache, v_cache=v_cache, rows=rows)


def check(operation: Callable[..., torch.Tensor], case: PagedCache, device: torch.device, scale: float = SCALE) -> None:
    expected = reference.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, scale)
    there = to_device(case, device)
    assert_close(operation(there.q, there.k_cache, there.v_cache, there.rows, scale).cpu(), expected)


@pytest.fixture(params=[64, 8192])
def split_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    def splits(_: int, kv_len: int, __: int) -> DecodeSplits:
        return DecodeSplits(-(-max(kv_len, 1) // request.param), request.param)

    monkeypatch.setattr(decode_attention, "decode_splits", splits)
    return int(request.param)


@pytest.mark.usefixtures("split_tokens")
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("rule", RULES)
def test_decode_agrees_with_the_reference(
    rule: Rule, window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(DECODE, rule, dtype)
    check(paged_decode_attention, case if window is None else with_window(case, window), device)


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("rule", RULES)
def test_prefill_agrees_with_the_reference(
    rule: Rule, window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(CHUNKS, rule, dtype)
    check(paged_prefill_attention, case if window is None else with_window(case, window), device)


@pytest.mark.usefixtures("split_tokens")
@pytest.mark.parametrize("rule", RULES)
def test_shared_prefixes_count_a_sink_once(rule: Rule, dtype: torch.dtype, device: torch.device) -> None:
    decode = make_case([(1, 80), (1, 65), (1, 96), (1, 33)], rule, dtype, prefix_groups=[(0, 3, 64)])
    check(paged_decode_attention, decode, device)
    chunks = make_case([(1, 70), (5, 90), (1, 65), (3, 40)], rule, dtype, prefix_groups=[(0, 3, 64)])
    check(paged_prefill_attention, chunks, device)


def test_scores_near_zero_keep_their_digits(dtype: torch.dtype, device: torch.device) -> None:
    check(paged_prefill_attention, make_case(CHUNKS, (50.0, False), dtype), device, 1e-3)


@pytest.mark.usefixtures("split_tokens")
@pytest.mark.parametrize("rule", RULES)
def test_a_key_that_is_stored_by_the_same_launch_is_capped_too(
    rule: Rule, dtype: torch.dtype, device: torch.device
) -> None:
    case = to_device(make_case([(1, n) for n in (133, 1, 17, 64)], rule, dtype), device)
    num_rows = case.rows.num_rows
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(num_rows, 12 * 64, generator=generator).to(dtype).to(device)
    positions = (case.rows.seq_lens - 1).long()
    blocks = case.rows.block_tables.long().gather(1, positions[:, None] // 16)[:, 0]
    angles = torch.rand(200, 32, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    slots = blocks * 16 + positions % 16
    caches = (case.k_cache.cpu().clone(), case.v_cache.cpu().clone())
    expected_heads = ProjectedHeads(qkv.cpu(), None, cos_sin.cpu(), positions.cpu(), *caches, slots.cpu())
    rows = to_device(case, torch.device("cpu")).rows
    expected = reference.store_and_decode(expected_heads, rows, SCALE)
    heads = ProjectedHeads(qkv, None, cos_sin, positions, case.k_cache, case.v_cache, slots)
    assert_close(store_and_decode(heads, case.rows, SCALE).cpu(), expected)
