"""Attention over shared prefixes on a CPU gives what attention without them gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu, reference
from kernels.cpu.shared_prefix import prefix_batches
from tests.support.tensors import PagedCache, assert_close, make_paged_cache

BLOCK = 16
Lens = list[tuple[int, int]]
Groups = list[tuple[int, int, int]]

EQUAL_LENS = [(1, 40)] * 8 + [(1, 9)] + [(1, 50)] * 9 + [(3, 60)] * 3 + [(1, 130)] * 8 + [(1, 33)] * 2
EQUAL_GROUPS = [(0, 8, 32), (9, 9, 32), (18, 3, 32), (21, 8, 112), (29, 2, 32)]


def check(case: PagedCache, *, is_decode: bool) -> None:
    arguments = (case.q, case.k_cache, case.v_cache, case.rows, 0.125)
    if is_decode:
        assert_close(cpu.paged_decode_attention(*arguments), reference.paged_decode_attention(*arguments))
    assert_close(cpu.paged_prefill_attention(*arguments), reference.paged_prefill_attention(*arguments))


@st.composite
def grouped_rows(draw: st.DrawFn, query_lens: tuple[int, ...]) -> tuple[Lens, Groups]:
    """Rows and their groups: groups of 2 to 9 beside one another or with other rows between them."""
    lens: Lens = []
    groups: Groups = []
    for _ in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(0, 2))):
            query_len = draw(st.sampled_from(query_lens))
            lens.append((query_len, query_len + draw(st.integers(0, 60))))
        num_tokens = BLOCK * draw(st.integers(1, 5))
        members = draw(st.lists(st.tuples(st.sampled_from(query_lens), st.integers(0, 50)), min_size=2, max_size=9))
        groups.append((len(lens), len(members), num_tokens))
        lens += [(query_len, num_tokens + query_len + own) for query_len, own in members]
    return lens, groups


@settings(max_examples=15, deadline=None)
@given(grouped_rows((1,)), st.sampled_from([(2, 2), (4, 2), (8, 1)]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_decode_agrees_with_the_reference(
    rows: tuple[Lens, Groups], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    lens, groups = rows
    case = make_paged_cache(
        lens, num_heads=heads[0], num_kv_heads=heads[1], head_dim=16, dtype=dtype, prefix_groups=groups
    )
    check(case, is_decode=True)


@settings(max_examples=15, deadline=None)
@given(grouped_rows((1, 2, 5, 19)), st.sampled_from([torch.float32, torch.bfloat16]))
def test_chunks_agree_with_the_reference(rows: tuple[Lens, Groups], dtype: torch.dtype) -> None:
    lens, groups = rows
    check(
        make_paged_cache(lens, num_heads=4, num_kv_heads=2, head_dim=16, dtype=dtype, prefix_groups=groups),
        is_decode=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (8, 2, 64), (7, 1, 80), (5, 5, 96)])
def test_every_shape_of_heads_agrees_with_the_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    lens = [(1, 40), (1, 65), (1, 97), (1, 66), (1, 3)]
    case = make_paged_cache(
        lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, prefix_groups=[(1, 3, 64)]
    )
    check(case, is_decode=True)


def test_64_rows_that_share_all_but_a_token_agree_with_the_reference() -> None:
    case = make_paged_cache(
        [(1, 33)] * 64, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32, prefix_groups=[(0, 64, 32)]
    )
    check(case, is_decode=True)


def equal_groups() -> PagedCache:
    return make_paged_cache(
        EQUAL_LENS, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, prefix_groups=EQUAL_GROUPS
    )


def test_groups_with_equally_long_prefixes_are_attended_together() -> None:
    check(equal_groups(), is_decode=False)


def test_equally_long_prefixes_are_one_batch_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = equal_groups().rows

    def batches() -> list[tuple[int, list[int]]]:
        starts = rows.cu_seqlens_q.tolist()
        groups = [(slice(starts[group[0]], starts[group[0] + group[1]]), group) for group in rows.prefix_groups]
        made = prefix_batches(groups, rows.block_tables, (4, 2), BLOCK)
        return [(batch.num_tokens, [*batch.num_vectors]) for batch in made]

    assert batches() == [(32, [32, 36, 36, 8]), (112, [32])]
    monkeypatch.setattr("kernels.cpu.shared_prefix.MAX_BATCH_SCORES", 80 * 32)
    assert batches() == [(32, [32, 36]), (32, [36, 8]), (112, [32])]  # one alone may be larger
    check(equal_groups(), is_decode=False)


def test_a_long_shared_prefix_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.shared_prefix.PIECE_BYTES", 32 * 2 * 16 * 4)  # 32 tokens
    lens = [(1, 150), (1, 115), (4, 200)]
    case = make_paged_cache(
        lens, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, prefix_groups=[(0, 3, 112)]
    )
    check(case, is_decode=False)


def test_own_keys_are_read_in_pieces_that_cut_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.indexed_attention.MAX_SCORES", 4 * 32 * 2)  # two chunks of four heads
    monkeypatch.setattr("kernels.cpu.indexed_attention.MAX_KEPT_SCORES", 4 * 200)
    lens = [(1, 150), (1, 115), (3, 9), (1, 5), (1, 200)]
    case = make_paged_cache(
        lens, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, prefix_groups=[(0, 2, 32)]
    )
    check(case, is_decode=False)


def test_consecutive_blocks_are_read_where_they_lie_and_left_alone() -> None:
    case = make_paged_cache(
        [(1, 40), (1, 50), (9, 60)], num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32,
        prefix_groups=[(0, 3, 32)],
    )  # fmt: skip
    blocks = list(dict.fromkeys(case.rows.block_tables.flatten().tolist()))  # in the order in which the rows use them
    blocks.remove(0)
    place = {0: 0} | {block: index + 1 for index, block in enumerate(blocks)}
    k_cache, v_cache = case.k_cache[[0, *blocks]], case.v_cache[[0, *blocks]]
    tables = torch.tensor([[place[block] for block in row] for row in case.rows.block_tables.tolist()]).int()
    assert tables[0, :2].tolist() == [1, 2]
    before = k_cache.nan_to_num(), v_cache.nan_to_num()
    check(PagedCache(case.q, k_cache, v_cache, replace(case.rows, block_tables=tables)), is_decode=False)
    for cache, copy in zip((k_cache, v_cache), before, strict=True):
        assert torch.equal(cache.nan_to_num(), copy)


def test_a_nan_in_one_rows_own_keys_does_not_reach_the_others_of_its_group() -> None:
    case = make_paged_cache(
        [(1, 40), (1, 40)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32, prefix_groups=[(0, 2, 32)]
    )
    case.v_cache[int(case.rows.block_tables[0, 2]), 3] = torch.nan
    output = cpu.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_a_nan_reaches_only_the_rows_of_a_batch_that_see_it() -> None:
    case = equal_groups()
    expected = cpu.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    case.v_cache[int(case.rows.block_tables[9, 1]), 3] = torch.nan  # prefix of the second group, rows 9 to 17
    case.q[2] = torch.nan  # a row of the first
    output = cpu.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    seen = torch.zeros(case.q.shape[0], dtype=torch.bool)
    seen[[2, *range(9, 18)]] = True
    assert output[seen].isnan().all()
    assert torch.equal(output[~seen], expected[~seen])


@pytest.mark.parametrize("poison", [0.0, torch.nan])
@pytest.mark.parametrize("num_alone", [0, 1], ids=["groups alone", "rows before and after"])
def test_a_layer_leaves_nothing_for_the_next(num_alone: int, poison: float) -> None:
    alone = [(1, 20)] * num_alone
    groups = [(first + num_alone, num_rows, num_tokens) for first, num_rows, num_tokens in EQUAL_GROUPS]
    case, other = (
        make_paged_cache(
            alone + EQUAL_LENS + alone, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32,
            prefix_groups=groups,
        )
        for _ in range(2)
    )  # fmt: skip
    first = cpu.paged_prefill_attention(case.q, case.k_cache + poison, case.v_cache, case.rows, 0.125)
    kept = first.clone()
    q, v_cache = other.q.flip(0), other.v_cache * 2
    second = cpu.paged_prefill_attention(q, case.k_cache, v_cache, case.rows, 0.125)  # the same plans
    fresh = cpu.paged_prefill_attention(q, case.k_cache, v_cache, other.rows, 0.125)
    assert torch.equal(second, fresh)
    assert torch.equal(first.nan_to_num(), kept.nan_to_num())


def test_the_shared_part_is_computed_from_the_group_and_not_from_every_row() -> None:
    """The prefix's blocks are read through the first member alone: its table says where they are."""
    case = make_paged_cache(
        [(1, 40), (1, 50)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32, prefix_groups=[(0, 2, 32)]
    )
    expected = cpu.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    tables = case.rows.block_tables.clone()
    tables[1, :2] = 0  # the null block, which holds NaN
    rows = replace(case.rows, block_tables=tables)
    assert_close(cpu.paged_decode_attention(case.q, case.k_cache, case.v_cache, rows, 0.25), expected)
