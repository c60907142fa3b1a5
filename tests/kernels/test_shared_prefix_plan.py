from __future__ import annotations

import pytest
import torch

from kernels.attention_types import AttentionRows, PrefixGroup
from kernels.triton import shared_prefix as shared_prefix_plan
from kernels.triton.attention_launch import AttentionLaunch
from kernels.triton.shared_prefix import SharedPrefixPlan, plan_decode, plan_prefill

LAUNCH = AttentionLaunch(block_m=16, tile=64, num_warps=4, num_stages=2)


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


def test_programs_of_the_same_keys_lie_side_by_side_and_every_pair_meets_every_shared_key_once() -> None:
    rows = make_rows([(1, 300), (3, 163), (4, 200), (1, 33), (1, 40)], (PrefixGroup(1, 2, 160), PrefixGroup(3, 2, 32)))
    plan = SharedPrefixPlan.build(rows, rows.prefix_groups, heads_per_kv_head=4, launch=LAUNCH, split_tokens=64)
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
    monkeypatch.setattr(shared_prefix_plan, "compute_capability", lambda: 90)
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


def test_only_groups_whose_queries_fill_fewer_blocks_together_are_planned_for_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_prefix_plan, "compute_capability", lambda: 90)
    groups = (PrefixGroup(0, 2, 512), PrefixGroup(2, 2, 256))
    rows = make_rows([(32, 600), (64, 600), (33, 600), (31, 600)], groups)  # 128 and 256 pairs of 4 heads; 132 and 124
    q = torch.zeros(160, 8, 128, dtype=torch.bfloat16)
    plan = plan_prefill(q, 2, rows)
    assert plan is not None
    assert plan.own_starts.tolist() == [0, 0, 256, 256]
    assert plan.programs.tolist() == [[2, 384, 160, 0, 256, 0], [2, 512, 160, 0, 256, 0]]
