"""Attention on a CPU agrees with the reference, and its gathers read each key once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu, reference
from kernels.cpu.attention import attend_single_queries
from kernels.cpu.kv_gather import SEGMENT_TOKENS, KvGatherPlan, gather_plan
from kernels.cpu.paged_reads import KvReader
from kernels.cpu.partial_attention import AttentionState, RunningAttention, merge_attention_states
from kernels.operands import KeyRange, ScoreRule
from tests.support.tensors import PagedCache, assert_close, make_paged_cache, merge_by_definition

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RAGGED = [(1, 133), (5, 18), (37, 37), (1, 1), (16, 48), (2, 2), (1, 16), (3, 20), (1, 17)]
DECODE = [(1, kv_len) for kv_len in (133, 1, 16, 17, 48, 131, 15, 64)]
HEADS = [(4, 4), (8, 2), (7, 1), (14, 2)]

BLOCK = 16


def check_prefill(case: PagedCache, scale: float) -> None:
    arguments = (case.q, case.k_cache, case.v_cache, case.rows, scale)
    assert_close(cpu.paged_prefill_attention(*arguments), reference.paged_prefill_attention(*arguments))


def check_decode(case: PagedCache, scale: float) -> None:
    arguments = (case.q, case.k_cache, case.v_cache, case.rows, scale)
    assert_close(cpu.paged_decode_attention(*arguments), reference.paged_decode_attention(*arguments))


def test_the_reference_agrees_with_pytorch_on_a_causal_row() -> None:
    case = make_paged_cache([(23, 23)], num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    output = reference.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.3)
    tokens = case.rows.block_tables[0, :2].long()
    keys, values = (cache[tokens].flatten(0, 1)[:23].transpose(0, 1) for cache in (case.k_cache, case.v_cache))
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q.transpose(0, 1), keys, values, is_causal=True, scale=0.3, enable_gqa=True
    )
    assert_close(output, expected.transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_ragged_prefill_agrees_with_the_reference(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    case = make_paged_cache(RAGGED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype)
    check_prefill(case, 0.125)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_ragged_decode_agrees_with_the_reference(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    case = make_paged_cache(DECODE, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype)
    check_decode(case, 0.125)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [80, 96, 128])
def test_every_head_dim_agrees_with_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    scale = head_dim**-0.5
    options = {"num_heads": 8, "num_kv_heads": 2, "head_dim": head_dim, "dtype": dtype}
    check_prefill(make_paged_cache([(1, 33), (5, 18), (9, 9)], **options), scale)  # type: ignore[arg-type]  # mixed options
    check_decode(make_paged_cache([(1, 33), (1, 18), (1, 9)], **options), scale)  # type: ignore[arg-type]  # mixed options


@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_every_block_size_agrees_with_the_reference(block_size: int) -> None:
    case = make_paged_cache(
        [(1, 41), (7, 30), (1, 300)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.float32,
        block_size=block_size,
    )
    check_prefill(case, 0.1)


def test_rows_longer_than_one_segment_are_merged_from_segments() -> None:
    # 2048 tokens a segment: two whole ones and a rest, exactly two, one and a single key, and a short row beside them.
    lens = [(1, 4200), (1, 4096), (1, 2049), (1, 30)]
    case = make_paged_cache(lens, num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    assert gather_plan(case.rows, 16, 1 << 20).num_segments == 3
    check_decode(case, 0.35)


def test_a_long_prefix_before_a_chunk_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.shared_prefix.PIECE_BYTES", 32 * 2 * 64 * 4)  # 32 tokens
    case = make_paged_cache(
        [(19, 150), (1, 150), (40, 40)], num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32
    )
    check_prefill(case, 0.125)


def test_decode_of_many_rows_takes_several_gathers() -> None:
    lens = [(1, 1 + 37 * i % 700) for i in range(24)]
    case = make_paged_cache(lens, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    check_decode(case, 0.25)
    assert len(gather_plan(case.rows, 16, (4 << 20) // 64).gathers) > 2


def test_a_row_without_keys_gets_zero() -> None:
    case = make_paged_cache([(1, 5), (1, 0)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    check_decode(case, 0.25)
    output = cpu.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    assert (output[1] == 0).all()
    part = attend_single_queries(case.q, KvReader(case.k_cache, case.v_cache), case.rows, ScoreRule(0.25))
    assert (part.lse[1] == -torch.inf).all()


def test_a_row_without_queries_is_passed_over() -> None:
    case = make_paged_cache([(0, 5), (3, 9), (0, 0)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    check_prefill(case, 0.25)


@pytest.mark.parametrize("kv_len", [0, 1, 4])
def test_queries_before_all_keys_of_their_row_get_zero(kv_len: int) -> None:
    case = make_paged_cache(
        [(3, 9), (0, 0), (7, kv_len)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32
    )
    check_prefill(case, 0.25)
    output = cpu.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    assert (output[3 : 10 - kv_len] == 0).all()
    assert (output[10 - kv_len :] != 0).any(-1).all()


def test_no_rows_give_no_queries() -> None:
    case = make_paged_cache([], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    assert cpu.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 1.0).shape == (0, 2, 16)
    assert cpu.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, 1.0).shape == (0, 2, 16)


def test_decode_refuses_rows_with_several_queries() -> None:
    case = make_paged_cache([(3, 9)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="3 queries for 1 rows"):
        cpu.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 1.0)


def test_a_nan_in_a_rows_own_keys_shows_in_that_row_only() -> None:
    case = make_paged_cache([(1, 20), (1, 20)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    case.k_cache[int(case.rows.block_tables[0, 0]), 3] = torch.nan
    output = cpu.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_attention_leaves_queries_and_caches_alone() -> None:
    case = make_paged_cache(RAGGED, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    before = [tensor.clone() for tensor in (case.q, case.k_cache, case.v_cache)]
    cpu.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    for tensor, copy in zip((case.q, case.k_cache, case.v_cache), before, strict=True):
        assert_close(tensor, copy, max_steps=0, rms_steps=0)


def test_a_step_plans_its_gathers_once() -> None:
    case = make_paged_cache(DECODE, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    assert gather_plan(case.rows, 16, 4096) is gather_plan(case.rows, 16, 4096)
    assert gather_plan(case.rows, 16, 4096) is not gather_plan(case.rows, 16, 64)


def random_state(dtype: torch.dtype, seed: int) -> AttentionState:
    generator = torch.Generator().manual_seed(seed)
    return AttentionState(
        torch.randn(5, 3, 16, generator=generator).to(dtype), torch.randn(5, 3, generator=generator) * 20
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_agrees_with_its_definition(dtype: torch.dtype) -> None:
    first, second = random_state(dtype, 1), random_state(dtype, 2)
    first.lse[0, 0] = second.lse[1, 1] = first.lse[2, 2] = second.lse[2, 2] = -torch.inf
    first.lse[3, 0] = torch.nan
    assert_close(merge_attention_states(first, second), merge_by_definition(*first, *second))


def test_attention_over_two_halves_merges_to_attention_over_all() -> None:
    torch.manual_seed(0)
    scores, values = torch.randn(4, 2, 30) * 3, torch.randn(4, 2, 30, 8)

    def attend(part: slice) -> AttentionState:
        output = torch.einsum("qhk,qhkd->qhd", scores[..., part].softmax(-1), values[..., part, :])
        return AttentionState(output, scores[..., part].logsumexp(-1))

    halves = (attend(slice(0, 11)), attend(slice(11, 30)))
    whole = attend(slice(0, 30))
    assert_close(merge_attention_states(*halves), whole.output)
    assert_close(merge_by_definition(*halves[0], *halves[1]), whole.output)
    running = RunningAttention((4, 2, 8))
    for half in halves:
        running.add(slice(None), *half)
    assert_close(running.state(torch.float32).output, whole.output)
    assert_close(running.state(torch.float32).lse, whole.lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_a_part_of_the_keys_comes_with_their_log_sum_exp(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    case = make_paged_cache(DECODE, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype)
    expected = torch.empty(len(DECODE), num_heads)
    for row, (_, kv_len) in enumerate(DECODE):
        tokens = case.k_cache[case.rows.block_tables[row].long()].flatten(0, 1)[:kv_len].float()
        keys = tokens.repeat_interleave(num_heads // num_kv_heads, dim=1)
        expected[row] = torch.einsum("hd,khd->hk", case.q[row].float(), keys).mul(0.125).logsumexp(-1)
    part = attend_single_queries(case.q, KvReader(case.k_cache, case.v_cache), case.rows, ScoreRule(0.125))
    # float32 whatever the dtype; in bfloat16 oneDNN rounds scores within about 1e-4.
    steps = 64.0 if dtype is torch.float32 else 2048.0
    assert_close(part.lse, expected, max_steps=steps, rms_steps=steps / 4)


def build(
    kv_lens: list[int], query_lens: list[int] | None = None, max_tokens: int = 4096, first: int = 0
) -> KvGatherPlan:
    """first: blocks at the head of each row that are not read."""
    width = max([-(-n // BLOCK) for n in kv_lens], default=0)
    tables = torch.zeros(len(kv_lens), width, dtype=torch.int32)
    for row, kv_len in enumerate(kv_lens):
        used = -(-kv_len // BLOCK)
        tables[row, :used] = torch.arange(used) + 1000 * (row + 1)
    lens = query_lens or [1] * len(kv_lens)
    keys = [
        KeyRange(row, sum(lens[:row]), first * BLOCK, kv_len)
        for row, (query_len, kv_len) in enumerate(zip(lens, kv_lens, strict=True))
        if query_len == 1 and kv_len > first * BLOCK
    ]
    return KvGatherPlan.build(tables, keys, BLOCK, max_tokens)


def keys_of(plan: KvGatherPlan) -> dict[int, list[tuple[int, int]]]:
    """Query -> the (block, offset) of every key it reads and does not mask, in order."""
    keys: dict[int, list[tuple[int, int]]] = {}
    for gather in plan.gathers:
        padding = set(gather.padding_ids.tolist())
        for index, query in enumerate(gather.query_ids.tolist()):
            for token in range(gather.num_tokens):
                place = index * gather.num_tokens + token
                masked = gather.mask is not None and bool(gather.mask[index, 0, 0, token] == -torch.inf)
                assert masked == (place in padding)
                if not masked:
                    keys.setdefault(query, []).append((int(gather.block_ids[place // BLOCK]), place % BLOCK))
    return keys


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 1, 1, 3]), st.integers(0, 700)), max_size=12),
    st.sampled_from([16, 64, 512, 4096]),
    st.sampled_from([0, 0, 1, 5]),
)
def test_every_single_query_row_reads_each_of_its_keys_once_and_in_order(
    lens: list[tuple[int, int]], max_tokens: int, first: int
) -> None:
    query_lens, kv_lens = [q for q, _ in lens], [kv for _, kv in lens]
    keys = keys_of(build(kv_lens, query_lens, max_tokens, first))
    expected = {}
    for row, (query_len, kv_len) in enumerate(lens):
        if query_len == 1 and kv_len > first * BLOCK:
            expected[sum(query_lens[:row])] = [
                (1000 * (row + 1) + token // BLOCK, token % BLOCK) for token in range(first * BLOCK, kv_len)
            ]
    assert keys == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=80))
def test_gathers_are_bounded_and_waste_at_most_a_fifth_of_what_they_read(kv_lens: list[int]) -> None:
    plan = build(kv_lens)
    for gather in plan.gathers:
        total = gather.num_ranges * gather.num_tokens
        assert total <= 4096
        assert len(set(gather.query_ids.tolist())) == gather.num_ranges
        # A block is padding as a whole; the open end of a row's last block is not waste that grouping could avoid.
        blocks = gather.padding_ids.reshape(-1) // BLOCK
        whole = (torch.bincount(blocks, minlength=total // BLOCK) == BLOCK).sum() if len(blocks) else 0
        assert total <= 1024 or whole * BLOCK * 5 <= total


def test_rows_of_equal_whole_blocks_need_no_mask() -> None:
    plan = build([64, 64, 64])
    assert len(plan.gathers) == 1
    assert plan.gathers[0].mask is None
    assert plan.gathers[0].padding_ids.shape == (0,)


def test_a_long_row_is_cut_at_absolute_positions_whatever_its_neighbours() -> None:
    alone = build([5000])
    beside = build([5000, 4900, 300])
    assert alone.num_segments == beside.num_segments == -(-5000 // SEGMENT_TOKENS)
    assert [gather.num_tokens for gather in alone.gathers] == [2048, 2048, 912]
    assert keys_of(alone)[0] == keys_of(beside)[0]


def test_no_single_query_rows_make_an_empty_plan() -> None:
    plan = build([20, 30], [2, 3])
    assert plan.gathers == ()
    assert plan.num_segments == 0
