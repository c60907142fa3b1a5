"""Deterministic attention: a query has the same bits in every batch and with any number of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import deterministic, reference
from kernels.deterministic.key_blocks import KEY_BLOCK_TOKENS, KeyBlockPlan
from kernels.operands import AttentionRows
from tests.support.tensors import PagedCache, assert_close, make_paged_cache

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RAGGED = [(1, 133), (5, 18), (37, 37), (1, 1), (140, 300), (2, 130), (1, 128), (3, 257)]
DECODE = [(1, kv_len) for kv_len in (133, 1, 16, 128, 129, 400, 15, 256)]
HEADS = [(4, 4), (8, 2), (7, 1), (14, 2), (6, 2), (24, 2)]


def check_prefill(case: PagedCache) -> None:
    arguments = (case.q, case.k_cache, case.v_cache, case.rows, 0.125)
    assert_close(deterministic.paged_prefill_attention(*arguments), reference.paged_prefill_attention(*arguments))


def check_decode(case: PagedCache) -> None:
    arguments = (case.q, case.k_cache, case.v_cache, case.rows, 0.125)
    assert_close(deterministic.paged_decode_attention(*arguments), reference.paged_decode_attention(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_attention_agrees_with_the_reference(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    check_prefill(make_paged_cache(RAGGED[:4], **heads, head_dim=64, dtype=dtype))
    check_decode(make_paged_cache(DECODE[:4], **heads, head_dim=64, dtype=dtype))


def test_long_rows_agree_with_the_reference() -> None:
    check_prefill(make_paged_cache(RAGGED, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32))
    check_decode(make_paged_cache(DECODE, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32))


def test_rows_without_keys_or_queries_are_passed_over() -> None:
    heads: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float32}
    check_prefill(make_paged_cache([(0, 5), (3, 9), (0, 0)], **heads))
    check_decode(make_paged_cache([(1, 5), (1, 0)], **heads))
    case = make_paged_cache([], **heads)
    check_decode(case)
    check_prefill(case)


def test_decode_refuses_rows_with_several_queries() -> None:
    case = make_paged_cache([(3, 9)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="3 queries for 1 rows"):
        deterministic.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 1.0)


def chunk(case: PagedCache, row: int, first: int, last: int) -> tuple[torch.Tensor, AttentionRows]:
    """Queries first .. last - 1 of a case whose rows have one query per key, as a step of their own."""
    start = int(case.rows.cu_seqlens_q[row])
    rows = AttentionRows(
        block_tables=case.rows.block_tables[row : row + 1],
        cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
        seq_lens=torch.tensor([last], dtype=torch.int32),
        query_lens=(last - first,),
        kv_lens=(last,),
    )
    return case.q[start + first : start + last], rows


def check_chunks(case: PagedCache, sizes: tuple[int, ...]) -> None:
    """Each query, in chunks of these sizes and as a row of decode, has the bits it has in one chunk with all."""
    attend = deterministic.paged_prefill_attention
    whole = attend(case.q, case.k_cache, case.v_cache, case.rows, 0.2)
    assert whole.isfinite().all()
    for row, length in enumerate(case.rows.kv_lens):
        start = int(case.rows.cu_seqlens_q[row])
        for size in sizes:
            for first in range(0, length, size):
                last = min(first + size, length)
                q, rows = chunk(case, row, first, last)
                part = attend(q, case.k_cache, case.v_cache, rows, 0.2)
                assert torch.equal(part, whole[start + first : start + last])
    last_queries = case.rows.cu_seqlens_q[1:].long() - 1
    num_rows = case.rows.num_rows
    decode_rows = AttentionRows(
        case.rows.block_tables,
        torch.arange(num_rows + 1, dtype=torch.int32),
        case.rows.seq_lens,
        (1,) * num_rows,
        case.rows.kv_lens,
    )
    queries = case.q[last_queries]
    decoded = deterministic.paged_decode_attention(queries, case.k_cache, case.v_cache, decode_rows, 0.2)
    assert torch.equal(decoded, whole[last_queries])
    for row, query in enumerate(last_queries.tolist()):
        q, rows = chunk(case, row, case.rows.kv_lens[row] - 1, case.rows.kv_lens[row])
        alone = deterministic.paged_decode_attention(q, case.k_cache, case.v_cache, rows, 0.2)
        assert torch.equal(alone[0], whole[query])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 1), (1, 1), (14, 2)])
def test_a_query_has_the_same_bits_in_every_chunk_and_in_decode(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    lens = [(300, 300), (131, 131), (20, 20)]
    heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    check_chunks(make_paged_cache(lens, **heads, head_dim=48, dtype=dtype), (7, 64, 129))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (1, 1)])
def test_two_threads_change_nothing_about_that(num_heads: int, num_kv_heads: int) -> None:
    heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    case = make_paged_cache([(140, 140), (20, 20)], **heads, head_dim=48, dtype=torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_chunks(case, (20, 64))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_the_blocks_of_the_cache_do_not_matter(block_size: int) -> None:
    lens = [(1, 300), (1, 70)]
    outputs = []
    for size in (16, block_size):
        case = make_paged_cache(lens, num_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float32, block_size=size)
        for row, (_, kv_len) in enumerate(lens):  # the same tokens whatever the blocks
            tokens = torch.randn(2, kv_len, 2, 32, generator=torch.Generator().manual_seed(row))
            for index in range(kv_len):
                block = int(case.rows.block_tables[row, index // size])
                case.k_cache[block, index % size], case.v_cache[block, index % size] = tokens[:, index]
        q = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(9))
        outputs.append(deterministic.paged_decode_attention(q, case.k_cache, case.v_cache, case.rows, 0.2))
    assert torch.equal(outputs[0], outputs[1])


def test_a_nan_in_a_rows_own_keys_shows_in_that_row_only() -> None:
    case = make_paged_cache([(1, 20), (1, 20)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    case.k_cache[int(case.rows.block_tables[0, 0]), 3] = torch.nan
    output = deterministic.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_decode_reads_its_keys_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_paged_cache(DECODE, num_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float32)
    arguments = (case.q, case.k_cache, case.v_cache, case.rows, 0.125)
    expected = deterministic.paged_decode_attention(*arguments)
    monkeypatch.setattr("kernels.deterministic.attention.SLAB_BYTES", 3 * 128 * 2 * 32 * 4)
    assert torch.equal(deterministic.paged_decode_attention(*arguments), expected)


def test_pairs_go_block_by_block_with_the_longest_rows_first() -> None:
    tables = torch.arange(1, 1 + 4 * 20, dtype=torch.int32).view(4, 20)
    plan = KeyBlockPlan.build(tables, (0, 0, 0, 0), (5, 300, 0, 129), block_size=16)
    assert plan.row_ids.tolist() == [1, 3, 0]
    assert plan.rows_with_block == (3, 2, 1)
    assert plan.places.tolist() == [0, 1, 2, 0, 1, 0]


def test_each_key_of_a_row_is_seen_once_and_nothing_else_is() -> None:
    tables = torch.randperm(200)[:30].int().view(2, 15) + 1
    kv_lens = (200, 17)
    plan = KeyBlockPlan.build(tables, [0] * len(kv_lens), kv_lens, block_size=16)
    for place, row in enumerate(plan.row_ids.tolist()):
        pairs = (plan.places == place).nonzero().flatten()
        seen = plan.slots[pairs][plan.mask[pairs][:, 0, 0] == 0].tolist()
        expected = [int(tables[row, index // 16]) * 16 + index % 16 for index in range(kv_lens[row])]
        assert seen == expected


def test_masked_keys_are_those_of_the_rows_last_token() -> None:
    plan = KeyBlockPlan.build(torch.tensor([[7, 9]], dtype=torch.int32), (0,), (20,), block_size=16)
    masked = plan.slots[plan.mask[:, 0, 0] == -torch.inf]
    assert masked.tolist() == [9 * 16 + 3] * (KEY_BLOCK_TOKENS - 20)


def test_no_keys_are_no_pairs() -> None:
    plan = KeyBlockPlan.build(torch.zeros(1, 1, dtype=torch.int32), (0,), (0,), block_size=16)
    assert plan.rows_with_block == ()
    assert plan.slots.shape == (0, KEY_BLOCK_TOKENS)
