"""How attention kernels are launched: blocks, splits and programs over shared prefixes, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.operands import AttentionRows, PrefixGroup
from kernels.triton import shared_prefix
from kernels.triton.attention_launch import (
    AttentionLaunch,
    DecodeSplits,
    decode_launch,
    decode_splits,
    decodes_projected,
    merge_block_rows,
    padded_head_dim,
    prefill_launch,
    saves_blocks,
    shared_prefix_launch,
    shared_prefix_split_tokens,
)
from kernels.triton.shared_prefix import SharedPrefixPlan, plan_decode, plan_prefill

H200 = 132

WIDE = AttentionLaunch(block_m=16, tile=32, num_warps=4, num_stages=5)


def test_a_head_dim_is_padded_to_a_power_of_two_a_product_takes() -> None:
    assert [padded_head_dim(head_dim) for head_dim in (8, 64, 80, 96, 128, 256)] == [16, 64, 128, 128, 128, 256]


def test_decode_packs_16_heads_and_has_one_warp_at_128_dims() -> None:
    for capability in (80, 89, 90):
        assert decode_launch(128, 2, capability) == AttentionLaunch(
            16, tile=16, num_warps=1, num_stages=5, max_registers=224
        )
        assert decode_launch(64, 2, capability) == AttentionLaunch(16, 32, num_warps=2, num_stages=5, max_registers=168)
        assert decode_launch(256, 2, capability) == WIDE
        assert decode_launch(64, 2, capability, is_capped=True) == replace(WIDE, max_registers=224)
        assert decode_launch(128, 2, capability, is_float8=True) == decode_launch(128, 2, capability)
        assert decode_launch(128, 2, capability, is_capped=True).num_warps == 4
        assert decode_launch(256, 2, capability, is_float8=True) == replace(WIDE, num_stages=4, max_registers=224)
        assert decode_launch(96, 2, capability) == AttentionLaunch(
            16, tile=64, num_warps=4, num_stages=3, max_registers=168
        )
        assert decode_launch(96, 2, capability, is_float8=True).tile == 16
        assert decode_launch(128, 4, capability).num_warps == 8


@pytest.mark.parametrize(("group_size", "heads", "at_once"), [(1, 1, 8), (2, 2, 4), (5, 8, 1), (8, 8, 1), (40, 16, 1)])
def test_parts_are_merged_as_many_at_a_time_as_registers_hold(group_size: int, heads: int, at_once: int) -> None:
    options = decode_launch(128, 2, 90).merge_options(group_size, 128)
    assert options == {"MERGED_HEADS": heads, "PARTS_AT_ONCE": at_once}


def test_heads_are_decoded_as_projected_where_that_spills_nothing() -> None:
    assert all(decodes_projected(head_dim, 2, capability) for head_dim in (64, 128) for capability in (80, 89, 90))
    assert not any(decodes_projected(*large, capability) for large in ((256, 2), (128, 4)) for capability in (80, 90))
    assert [decodes_projected(96, 2, capability) for capability in (80, 89, 90)] == [False, False, True]


@pytest.mark.parametrize(
    ("head_dim", "element_bytes", "capability", "expected"),
    [
        (128, 2, 90, AttentionLaunch(128, 64, 8, 5)),
        (80, 2, 90, AttentionLaunch(128, 64, 8, 5)),
        (128, 2, 80, AttentionLaunch(128, 32, 8, 5)),
        (128, 2, 89, AttentionLaunch(128, 32, 8, 5)),
        (64, 2, 90, AttentionLaunch(128, 64, 8, 5)),
        (64, 2, 80, AttentionLaunch(128, 64, 8, 3)),
        (256, 2, 90, AttentionLaunch(64, 32, 8, 5)),
        (256, 2, 80, AttentionLaunch(64, 32, 8, 2)),
        (128, 4, 90, AttentionLaunch(16, 16, 8, 1, 255)),
        (256, 4, 80, AttentionLaunch(16, 16, 8, 1, 255)),
    ],
)
def test_prefill_launches_fit_the_head_dim_and_the_gpu(
    head_dim: int, element_bytes: int, capability: int, expected: AttentionLaunch
) -> None:
    assert prefill_launch(head_dim, element_bytes, capability) == expected


def num_splits(num_rows: int, num_kv_heads: int, max_kv_len: int) -> int:
    return decode_splits(num_rows * num_kv_heads, max_kv_len, H200).num_splits


@pytest.mark.parametrize(("num_rows", "max_kv_len"), [(33, 4096), (64, 4096), (256, 1024), (1, 128), (33, 8192)])
def test_rows_that_fill_the_gpu_and_short_rows_are_not_split(num_rows: int, max_kv_len: int) -> None:
    assert num_splits(num_rows, 8, max_kv_len) == 1


@pytest.mark.parametrize(
    ("num_rows", "num_kv_heads", "max_kv_len", "expected"),
    [(1, 8, 4096, 32), (1, 8, 32_768, 64), (1, 4, 1024, 8), (16, 8, 4096, 5), (32, 8, 4096, 3), (64, 8, 32_768, 4)],
)
def test_few_or_very_long_rows_are_split(num_rows: int, num_kv_heads: int, max_kv_len: int, expected: int) -> None:
    assert num_splits(num_rows, num_kv_heads, max_kv_len) == expected


def test_splits_hold_whole_tiles_and_at_least_two_of_them() -> None:
    for num_rows in (1, 3, 17, 40, 500):
        for max_kv_len in (0, 1, 63, 129, 1000, 4097, 131_072):
            splits = decode_splits(num_rows * 8, max_kv_len, H200)
            split_tokens = _split_tokens(splits, max_kv_len)
            assert split_tokens % decode_launch(128, 2, 90).tile == 0
            assert split_tokens % decode_launch(128, 4, 90).tile == 0
            assert 128 <= split_tokens <= 8192
            assert split_tokens * splits.num_splits >= max_kv_len


def _split_tokens(splits: DecodeSplits, num_tokens: int) -> int:
    """What the kernel makes of them for a row."""
    return max(-(-num_tokens // splits.num_splits // 64) * 64, splits.min_split_tokens)


def test_a_bound_of_the_longest_row_splits_short_rows_as_finely() -> None:
    for num_rows in (1, 2, 8, 16):
        bounded = decode_splits(num_rows * 8, 40_960, H200)
        for kv_len in (100, 500, 2000):
            known = decode_splits(num_rows * 8, kv_len, H200)
            assert _split_tokens(bounded, kv_len) <= _split_tokens(known, kv_len)
    many = decode_splits(64 * 8, 40_960, H200)
    assert (many.num_splits, _split_tokens(many, 8192)) == (5, 8192)


@pytest.mark.parametrize(
    ("num_pairs", "head_dim", "element_bytes", "capability", "expected"),
    [
        (16, 128, 2, 90, WIDE),
        (17, 128, 2, 90, AttentionLaunch(64, 64, 4, 3)),
        (64, 128, 2, 80, AttentionLaunch(64, 32, 4, 3)),
        (65, 128, 2, 90, prefill_launch(128, 2, 90)),
        (400, 256, 2, 90, AttentionLaunch(64, 32, 8, 5)),
        (400, 256, 2, 80, prefill_launch(256, 2, 80)),
        (8, 128, 4, 90, prefill_launch(128, 4, 90)),
        (64, 128, 4, 90, prefill_launch(128, 4, 90)),
    ],
)
def test_the_largest_group_decides_the_block_over_shared_keys(
    num_pairs: int, head_dim: int, element_bytes: int, capability: int, expected: AttentionLaunch
) -> None:
    assert shared_prefix_launch(num_pairs, head_dim, element_bytes, capability) == expected


@pytest.mark.parametrize(
    ("block_m", "num_programs", "max_tokens", "expected"),
    [
        (128, 16, 3584, 448 + 64),  # 64 rows of 4 heads, 8 KV heads: 9 parts would fill it, but 512 is the least
        (128, 66, 3584, 3584),  # half the multiprocessors
        (64, 32, 3584, 448),
        (16, 128, 3584, 768),
        (16, 8, 3584, 128),
        (16, 264, 16_384, 8192),
    ],
)
def test_shared_keys_are_split_until_the_gpu_is_full(
    block_m: int, num_programs: int, max_tokens: int, expected: int
) -> None:
    split_tokens = shared_prefix_split_tokens(block_m, num_programs, max_tokens, H200)
    assert split_tokens == expected
    assert split_tokens % 64 == 0


def test_rows_share_blocks_where_that_takes_fewer_of_them() -> None:
    assert saves_blocks([4, 4], 128)
    assert saves_blocks([100, 100, 50], 128)
    assert not saves_blocks([128, 256], 128)
    assert not saves_blocks([100, 100], 128)
    assert not saves_blocks([0, 64], 128)


def test_a_merge_program_takes_2048_elements() -> None:
    assert [merge_block_rows(head_dim) for head_dim in (64, 80, 128, 256, 4096)] == [32, 16, 16, 8, 1]


def make_rows(lens: list[tuple[int, int]], groups: tuple[PrefixGroup, ...]) -> AttentionRows:
    query_lens, kv_lens = zip(*lens, strict=True)
    return AttentionRows(
        block_tables=torch.zeros(len(lens), 1, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
        query_lens=query_lens,
        kv_lens=kv_lens,
        prefix_groups=groups,
    )


def test_every_pair_meets_every_shared_key_once_in_neighbouring_programs() -> None:
    rows = make_rows([(1, 300), (3, 163), (4, 200), (1, 33), (1, 40)], (PrefixGroup(1, 2, 160), PrefixGroup(3, 2, 32)))
    plan = SharedPrefixPlan.build(rows, rows.prefix_groups, heads_per_kv_head=4, launch=WIDE, split_tokens=64)
    # row, first pair, end of the queries, start and end of the keys, part: queries 1 to 8 are 28 pairs of 4 heads
    assert plan.programs.tolist() == [
        *([1, 4, 8, 0, 64, 0], [1, 20, 8, 0, 64, 0]),
        *([1, 4, 8, 64, 128, 1], [1, 20, 8, 64, 128, 1]),
        *([1, 4, 8, 128, 160, 2], [1, 20, 8, 128, 160, 2]),
        [3, 32, 10, 0, 32, 0],
    ]
    assert plan.own_starts.tolist() == [0, 160, 160, 32, 32]
    assert (plan.max_parts, plan.max_own_tokens) == (3, 300)
    assert plan.programs.dtype == plan.own_starts.dtype == torch.int32


def test_without_groups_there_is_no_plan() -> None:
    rows = make_rows([(1, 300), (1, 300)], ())
    assert plan_decode(torch.zeros(2, 4, 64), 2, rows) is None
    assert plan_prefill(torch.zeros(2, 4, 64), 2, rows) is None


def test_a_step_has_one_plan_for_each_shape_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "compute_capability", lambda: 90)
    rows = make_rows([(1, 1000)] * 40, (PrefixGroup(0, 40, 512),))
    q = torch.zeros(40, 8, 128, dtype=torch.bfloat16)
    plan = plan_decode(q, 2, rows)
    assert plan is not None
    assert plan is plan_decode(q, 2, rows)
    other = plan_decode(q, 8, rows)
    assert other is not None
    assert (plan.launch.block_m, other.launch.block_m) == (128, 64)  # 40 rows of 4 heads, of 1
    chunks = plan_prefill(q, 2, rows)
    assert chunks is not None
    assert (plan.max_parts, chunks.max_parts) == (1, 1)
    assert chunks.split_tokens == 512


def test_chunks_plan_only_groups_that_fill_fewer_blocks_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_prefix, "compute_capability", lambda: 90)
    groups = (PrefixGroup(0, 2, 512), PrefixGroup(2, 2, 256))
    rows = make_rows([(32, 600), (64, 600), (33, 600), (31, 600)], groups)  # 128 and 256 pairs of 4 heads; 132 and 124
    q = torch.zeros(160, 8, 128, dtype=torch.bfloat16)
    plan = plan_prefill(q, 2, rows)
    assert plan is not None
    assert plan.own_starts.tolist() == [0, 0, 256, 256]
    assert plan.programs.tolist() == [[2, 384, 160, 0, 256, 0], [2, 512, 160, 0, 256, 0]]
