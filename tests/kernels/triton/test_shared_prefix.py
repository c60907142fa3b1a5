"""Triton attention over shared prefixes agrees with the reference however keys are split, and so does the merge."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import cpu, reference
from kernels.operands import AttentionRows
from kernels.triton import decode_attention, shared_prefix
from kernels.triton.attention_launch import AttentionLaunch, DecodeSplits
from kernels.triton.decode_attention import paged_decode_attention
from kernels.triton.partial_attention import merge_attention_states
from kernels.triton.prefill_attention import paged_prefill_attention
from tests.support.tensors import PagedCache, assert_close, make_paged_cache, merge_by_definition

pytestmark = pytest.mark.usefixtures("guarded_memory")

Operation = Callable[..., torch.Tensor]
Lens = list[tuple[int, int]]
Groups = list[tuple[int, int, int]]
# A row outside, two groups side by side, rows outside; own parts of one token and of several tiles.
DECODE: Lens = [(1, 40), (1, 97), (1, 113), (1, 180), (1, 17), (1, 90), (1, 0)]
CHUNKS: Lens = [(3, 40), (1, 97), (5, 101), (20, 130), (2, 18), (9, 40), (0, 20), (4, 4)]
GROUPS: Groups = [(1, 3, 96), (4, 2, 16)]


def split_every(monkeypatch: pytest.MonkeyPatch, shared_tokens: int, own_tokens: int) -> None:
    monkeypatch.setattr(shared_prefix, "shared_prefix_split_tokens", lambda *_: shared_tokens)

    def splits(_: int, max_own_tokens: int, __: int) -> DecodeSplits:
        return DecodeSplits(max(-(-max_own_tokens // own_tokens), 1), own_tokens)

    monkeypatch.setattr(decode_attention, "decode_splits", splits)


def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attends groups together in prefill, also where that saves nothing."""
    monkeypatch.setattr(shared_prefix, "saves_blocks", lambda *_: True)


def run(
    operation: Operation, case: PagedCache, device: torch.device, scale: float, num_layers: int = 1
) -> torch.Tensor:
    rows = AttentionRows(
        block_tables=case.rows.block_tables.to(device),
        cu_seqlens_q=case.rows.cu_seqlens_q.to(device),
        seq_lens=case.rows.seq_lens.to(device),
        query_lens=case.rows.query_lens,
        kv_lens=case.rows.kv_lens,
        prefix_groups=case.rows.prefix_groups,
    )
    q, k_cache, v_cache = (tensor.to(device) for tensor in (case.q, case.k_cache, case.v_cache))
    for _ in range(num_layers):
        output = operation(q, k_cache, v_cache, rows, scale)
    return output.cpu()


def check(operation: Operation, case: PagedCache, device: torch.device, scale: float = 0.2) -> None:
    expected = reference.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, scale)
    assert_close(run(operation, case, device, scale), expected)


@pytest.mark.parametrize(("shared_tokens", "own_tokens"), [(32, 64), (48, 8192), (8192, 32), (8192, 8192)])
def test_decode_agrees_with_the_reference_however_keys_are_split(
    shared_tokens: int, own_tokens: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_every(monkeypatch, shared_tokens, own_tokens)
    options: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    check(paged_decode_attention, make_paged_cache(DECODE, dtype=dtype, prefix_groups=GROUPS, **options), device)


@pytest.mark.parametrize(
    ("heads_per_kv_head", "block_m"),
    [(1, 16), (2, 64), (3, 16), (4, 128), (5, 64), (6, 16), (7, 128), (8, 64)],
)
def test_every_number_of_heads_in_blocks_of_every_size(
    heads_per_kv_head: int, block_m: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = AttentionLaunch(block_m=block_m, tile=32, num_warps=4, num_stages=1)
    monkeypatch.setattr(shared_prefix, "shared_prefix_launch", lambda *_: launch)
    split_every(monkeypatch, 64, 64)
    share_everything(monkeypatch)
    num_kv_heads = 2 if heads_per_kv_head == 3 else 1
    options: dict[str, Any] = {"num_heads": heads_per_kv_head * num_kv_heads, "num_kv_heads": num_kv_heads}
    options |= {"head_dim": 16, "dtype": torch.float32}
    check(paged_decode_attention, make_paged_cache(DECODE, prefix_groups=GROUPS, **options), device)
    check(paged_prefill_attention, make_paged_cache(CHUNKS, prefix_groups=GROUPS, **options), device)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_every_head_dim(
    head_dim: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_everything(monkeypatch)
    options: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim, "dtype": dtype}
    for operation, lens in ((paged_decode_attention, DECODE), (paged_prefill_attention, CHUNKS)):
        check(operation, make_paged_cache(lens, prefix_groups=GROUPS, **options), device, head_dim**-0.5)


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_every_block_size(block_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    share_everything(monkeypatch)
    options: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    groups = [(1, 3, 3 * block_size)]
    for operation, queries in ((paged_decode_attention, (1, 1, 1, 1)), (paged_prefill_attention, (2, 7, 1, 3))):
        lens = [(count, 3 * block_size + count + more) for count, more in zip(queries, (0, 0, 5, 70), strict=True)]
        case = make_paged_cache(lens, block_size=block_size, prefix_groups=groups, **options)
        check(operation, case, device)


@pytest.mark.parametrize("seed", range(8))
def test_random_groups(seed: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    is_decode = seed % 2 == 0
    split_every(monkeypatch, draw.choice([32, 64, 8192]), draw.choice([64, 8192]))
    if draw.random() < 0.7:
        share_everything(monkeypatch)
    lens: Lens = []
    groups: Groups = []
    while len(lens) < 6:
        members = draw.choice([1, 1, 2, 3, 5])
        shared = 16 * draw.choice([1, 2, 5, 7]) if members > 1 else 0
        if shared:
            groups.append((len(lens), members, shared))
        for _ in range(members):
            query_len = 1 if is_decode else draw.choice([1, 2, 5, 20])
            lens.append((query_len, shared + query_len + draw.choice([0, 0, 1, 15, 64, 100])))
    options: dict[str, Any] = {"num_heads": draw.choice([1, 2, 4, 7, 8]), "num_kv_heads": 1}
    case = make_paged_cache(lens, head_dim=draw.choice([16, 32]), dtype=dtype, prefix_groups=groups, **options)
    check(paged_decode_attention if is_decode else paged_prefill_attention, case, device)


def test_large_scores_of_either_part_do_not_overflow(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    share_everything(monkeypatch)
    options: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float32}
    case = make_paged_cache([(1, 70), (1, 36)], prefix_groups=[(0, 2, 32)], **options)
    case = replace(case, q=case.q * 0 + 1e3)
    shared, own = int(case.rows.block_tables[0, 0]), int(case.rows.block_tables[0, 2])
    for loud in (shared, own):
        keys = case.k_cache.abs() * 0.01
        keys[loud] *= 1e3
        for operation in (paged_decode_attention, paged_prefill_attention):
            check(operation, replace(case, k_cache=keys), device, 1.0)


def test_a_nan_shows_in_the_rows_that_see_it_only(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    share_everything(monkeypatch)
    options: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float32}
    for block, seeing in ((0, [0, 1]), (1, [0])):  # a shared block, a block of row 0's own
        case = make_paged_cache([(1, 20), (1, 20), (1, 20)], prefix_groups=[(0, 2, 16)], **options)
        case.k_cache[int(case.rows.block_tables[0, block]), 3] = torch.nan
        for operation in (paged_decode_attention, paged_prefill_attention):
            output = run(operation, case, device, 0.25)
            for row in range(3):
                assert output[row].isnan().all() == (row in seeing)


def test_queries_and_caches_may_be_views(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    share_everything(monkeypatch)
    options: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32}
    case = make_paged_cache(DECODE, prefix_groups=GROUPS, **options)
    both = torch.stack((case.k_cache, case.v_cache), dim=1)  # [num_blocks, 2, block_size, Hkv, D]
    heads = torch.cat((torch.full_like(case.q, torch.nan), case.q), dim=1)[:, 4:]  # as queries lie in a qkv
    dims = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    for operation in (paged_decode_attention, paged_prefill_attention):
        for q in (heads, dims):
            check(operation, replace(case, q=q, k_cache=both[:, 0], v_cache=both[:, 1]), device)


def test_host_lengths_may_be_bounds(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    split_every(monkeypatch, 64, 64)
    options: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float32}
    case = make_paged_cache(DECODE, prefix_groups=GROUPS, **options)
    expected = run(paged_decode_attention, case, device, 0.25)
    found = run(
        paged_decode_attention, replace(case, rows=replace(case.rows, kv_lens=(1000,) * len(DECODE))), device, 0.25
    )
    assert_close(found, expected)


class Launches:
    """Counts the programs over shared keys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_programs: list[int] = []
        build = shared_prefix.SharedPrefixPlan.build

        def counting(*args: Any) -> shared_prefix.SharedPrefixPlan:
            plan = build(*args)
            self.num_programs.append(plan.programs.shape[0])
            return plan

        monkeypatch.setattr(shared_prefix.SharedPrefixPlan, "build", counting)


def test_a_prefix_is_attended_once_for_all_and_planned_once_a_step(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_every(monkeypatch, 32, 64)
    launches = Launches(monkeypatch)
    options: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    case = make_paged_cache(DECODE, prefix_groups=GROUPS, **options)
    first, second = (run(paged_decode_attention, case, device, 0.2, num_layers) for num_layers in (1, 2))
    assert_close(second, first, max_steps=0, rms_steps=0)
    assert launches.num_programs == 2 * [3 + 1]  # 3 rows of 2 pairs a head fit one block; 96 and 16 keys in 32s


def test_chunks_that_fill_their_blocks_alone_are_left_apart(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(monkeypatch)
    options: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float32}
    # Blocks of 32 pairs: 8 and 16 queries of 4 heads fill one and two, two rows of 2 queries fit in one.
    lens = [(8, 40), (16, 80), (2, 18), (2, 18)]
    check(paged_prefill_attention, make_paged_cache(lens, prefix_groups=[(0, 2, 32)], **options), device)
    assert launches.num_programs == []
    check(paged_prefill_attention, make_paged_cache(lens, prefix_groups=[(0, 2, 32), (2, 2, 16)], **options), device)
    assert launches.num_programs == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (32, 8), (32, 4)])
@pytest.mark.parametrize("num_members", [2, 8, 40])
def test_real_shapes_agree_with_the_cpu_implementation(
    num_members: int, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    options: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 128}
    groups = [(1, num_members, 2048)]
    for operation, expected, query_len in (
        (paged_decode_attention, cpu.paged_decode_attention, 1),
        (paged_prefill_attention, cpu.paged_prefill_attention, 9),
    ):
        lens = [(query_len, 700), *((query_len, 2060 + 30 * row) for row in range(num_members))]
        case = make_paged_cache(lens, dtype=torch.bfloat16, prefix_groups=groups, **options)
        found = run(operation, case, device, 128**-0.5)
        plain = case.without_groups()
        output = expected(plain.q.float(), plain.k_cache.float(), plain.v_cache.float(), plain.rows, 128**-0.5)
        assert_close(found, output.bfloat16())


def random_part(dtype: torch.dtype, seed: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and natural log-sum-exp over some keys."""
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(23, 3, head_dim, generator=generator).to(dtype)
    return output, torch.randn(23, 3, generator=generator) * 20


def merge_on(
    device: torch.device, first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> torch.Tensor:
    """The kernel takes log-sum-exps to base 2; these are natural."""
    lses = [lse.double().div(math.log(2)).float().to(device) for lse in (first_lse, second_lse)]
    return merge_attention_states(first.to(device), lses[0], second.to(device), lses[1]).cpu()


@pytest.mark.parametrize("head_dim", [80, 128])
def test_merge_agrees_with_its_definition(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    (first, first_lse), (second, second_lse) = random_part(dtype, 1, head_dim), random_part(dtype, 2, head_dim)
    first_lse[0, 0] = second_lse[1, 1] = first_lse[2, 2] = second_lse[2, 2] = -torch.inf
    first[2, 2] = second[2, 2] = 0
    first_lse[3, 0] = torch.nan
    first_lse[4], second_lse[4] = 300.0, 299.0  # exp(300) is not a float32
    expected = merge_by_definition(first, first_lse, second, second_lse)
    assert_close(merge_on(device, first, first_lse, second, second_lse), expected)
    view, lse_view = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (first, first_lse))
    assert_close(merge_on(device, view, lse_view, second, second_lse), expected)


def test_what_saw_no_key_counts_for_nothing(device: torch.device) -> None:
    (first, first_lse), (second, second_lse) = random_part(torch.float32, 1, 80), random_part(torch.float32, 2, 80)
    first_lse[0], second_lse[0] = -torch.inf, -torch.inf
    first[0] = torch.nan
    first_lse[1], second_lse[1] = torch.nan, -torch.inf
    first_lse[2], first[2] = -torch.inf, torch.nan
    second_lse[3], second[3] = -torch.inf, torch.nan
    merged = merge_on(device, first, first_lse, second, second_lse)
    assert (merged[0] == 0).all()
    assert merged[1].isnan().all()
    assert_close(merged[2], second[2])
    assert_close(merged[3], first[3])


def test_merge_of_nothing_is_nothing(device: torch.device) -> None:
    empty = (torch.zeros(0, 2, 16), torch.zeros(0, 2))
    assert merge_on(device, *empty, *empty).shape == (0, 2, 16)
