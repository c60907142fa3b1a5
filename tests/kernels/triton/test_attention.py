"""Triton attention in prefill and decode agrees with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels import cpu, reference
from kernels.operands import AttentionRows, PrefixGroup, ProjectedHeads
from kernels.triton import attention_launch, decode_attention, prefill_attention
from kernels.triton.attention_launch import DecodeSplits
from kernels.triton.decode_attention import paged_decode_attention, store_and_decode
from kernels.triton.prefill_attention import paged_prefill_attention
from kernels.triton.rope_kv_store import qk_norm_rope_store_kv
from tests.support.devices import past_int32_storage
from tests.support.tensors import PagedCache, assert_close, assert_same_bits, make_paged_cache, with_window

pytestmark = pytest.mark.usefixtures("guarded_memory")

Operation = Callable[..., torch.Tensor]
Array = npt.NDArray[Any]
RAGGED = [(1, 133), (5, 18), (37, 37), (1, 1), (3, 70)]
DECODE = [(1, kv_len) for kv_len in (133, 1, 17, 0, 64)]
HEADS = [(2, 2), (8, 2), (7, 1), (16, 1)]
HEAD_DIMS = [64, 80, 96, 128, 256]
UNSPLIT = 8192
FAR = 715_827_888  # a stride three of which no int32 holds


def split_every(monkeypatch: pytest.MonkeyPatch, split_tokens: int) -> None:
    def splits(_: int, kv_len: int, __: int) -> DecodeSplits:
        return DecodeSplits(-(-max(kv_len, 1) // split_tokens), split_tokens)

    monkeypatch.setattr(decode_attention, "decode_splits", splits)


def to_device(case: PagedCache, device: torch.device) -> PagedCache:
    names = ("block_tables", "cu_seqlens_q", "seq_lens")
    rows = replace(case.rows, **{name: getattr(case.rows, name).to(device) for name in names})
    q, k_cache, v_cache = (tensor.to(device) for tensor in (case.q, case.k_cache, case.v_cache))
    return PagedCache(q=q, k_cache=k_cache, v_cache=v_cache, rows=rows)


def run(operation: Callable[..., torch.Tensor], case: PagedCache, scale: float, device: torch.device) -> torch.Tensor:
    case = to_device(case, device)
    return operation(case.q, case.k_cache, case.v_cache, case.rows, scale).cpu()


def check(operation: Callable[..., torch.Tensor], case: PagedCache, device: torch.device, scale: float = 0.125) -> None:
    expected = reference.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, scale)
    assert_close(run(operation, case, scale, device), expected)


@pytest.mark.parametrize("split_tokens", [64, UNSPLIT])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_ragged_decode_agrees_with_the_reference(
    num_heads: int,
    num_kv_heads: int,
    split_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split_every(monkeypatch, split_tokens)
    case = make_paged_cache(DECODE, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype)
    check(paged_decode_attention, case, device)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_ragged_prefill_agrees_with_the_reference(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_paged_cache(RAGGED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype)
    check(paged_prefill_attention, case, device)


@pytest.mark.parametrize("split_tokens", [64, UNSPLIT])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "window"), [(8, 2, 1), (7, 1, 33), (2, 2, 64), (16, 1, 200)])
def test_windows_agree_with_the_reference(
    num_heads: int,
    num_kv_heads: int,
    window: int,
    split_tokens: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that no query sees are gone."""
    split_every(monkeypatch, split_tokens)
    options: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "dtype": torch.float32}
    decode = with_window(make_paged_cache([*DECODE, (1, 300)], head_dim=80, **options), window)
    check(paged_decode_attention, decode, device)
    stored = with_window(make_paged_cache([(1, n) for n in (133, 1, 17, 64, 300)], head_dim=64, **options), window)
    check_store_and_decode(stored, device)
    if split_tokens == UNSPLIT:
        chunks = with_window(make_paged_cache([*RAGGED, (60, 300)], head_dim=64, **options), window)
        check(paged_prefill_attention, chunks, device)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_agrees_with_the_reference(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    def case(lens: list[tuple[int, int]]) -> PagedCache:
        return make_paged_cache(lens, num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype)

    check(paged_prefill_attention, case([(1, 33), (5, 70), (9, 9)]), device, head_dim**-0.5)
    check(paged_decode_attention, case([(1, 130), (1, 67), (1, 9)]), device, head_dim**-0.5)  # two splits
    check(paged_decode_attention, case([(1, 67), (1, 9)]), device, head_dim**-0.5)  # and one


@pytest.mark.parametrize("block_size", [8, 32, 64, 256])
def test_every_block_size_agrees_with_the_reference(block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    options: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": block_size}
    lens = [(1, 41), (7, 130), (1, 300)]
    check(paged_prefill_attention, make_paged_cache(lens, dtype=dtype, **options), device)
    check(paged_decode_attention, make_paged_cache([(1, kv) for _, kv in lens], dtype=dtype, **options), device)


def test_a_tile_of_128_finds_its_blocks_from_the_middle_of_one_on(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split begins in the middle of a block of 128 keys, and its first tile ends in the next."""
    launch = attention_launch.AttentionLaunch(block_m=16, tile=128, num_warps=4, num_stages=1)
    monkeypatch.setattr(decode_attention, "decode_launch", lambda *_, **__: launch)
    monkeypatch.setattr(decode_attention, "decode_splits", lambda *_: DecodeSplits(5, 128))
    options: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    check(paged_decode_attention, make_paged_cache([(1, 900), (1, 300)], block_size=128, **options), device, 0.25)


def test_more_query_heads_than_a_decode_program_takes(dtype: torch.dtype, device: torch.device) -> None:
    lens = [(1, 70), (1, 9)]
    case = make_paged_cache(lens, num_heads=38, num_kv_heads=2, head_dim=16, dtype=dtype)
    check(paged_decode_attention, case, device, 0.25)


def test_a_chunk_of_several_blocks_after_a_long_prefix(dtype: torch.dtype, device: torch.device) -> None:
    # 3 heads a KV head: a block of 128 pairs ends within a query's heads. 90 queries are 270 pairs, three blocks.
    case = make_paged_cache([(90, 137), (40, 40), (1, 137)], num_heads=6, num_kv_heads=2, head_dim=32, dtype=dtype)
    check(paged_prefill_attention, case, device, 0.2)


def test_the_search_for_a_row_goes_past_the_first_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_attention, "ROWS_AT_ONCE", 4)
    lens = [(1 + i % 3, 5 + i) for i in range(9)] + [(40, 40)]
    case = make_paged_cache(lens, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    check(paged_prefill_attention, case, device, 0.25)


def test_many_splits_are_merged_in_several_steps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_launch, "_MERGED_ELEMENTS_OF_A_WARP", 8)  # two parts at a time
    split_every(monkeypatch, 64)
    case = make_paged_cache([(1, 300), (1, 5), (1, 129)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    check(paged_decode_attention, case, device, 0.25)


def test_rows_without_queries_and_without_keys(dtype: torch.dtype, device: torch.device) -> None:
    case = make_paged_cache([(0, 5), (3, 9), (0, 0), (1, 4)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=dtype)
    check(paged_prefill_attention, case, device, 0.25)
    case = make_paged_cache([(1, 0), (1, 0)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=dtype)
    output = run(paged_decode_attention, case, 0.25, device)
    assert (output == 0).all()


@pytest.mark.parametrize("kv_len", [0, 1, 40])
def test_queries_before_all_keys_of_their_row_get_zero(kv_len: int, device: torch.device) -> None:
    """As padding has them, behind the chunks of a captured step."""
    lens = [(3, 9), (0, 0), (70, kv_len)]
    case = make_paged_cache(lens, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    check(paged_prefill_attention, case, device, 0.25)
    assert (run(paged_prefill_attention, case, 0.25, device)[3 : 73 - kv_len] == 0).all()


def test_counts_of_splits_are_0_again_after_each_launch(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Or the next launch would merge a row before all of its parts are there, or never."""
    split_every(monkeypatch, 64)
    lens = [(1, 300), (1, 64), (1, 65), (1, 1), (1, 0)]
    case = make_paged_cache(lens, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    decode_attention._arrivals.cache_clear()
    first = run(paged_decode_attention, case, 0.25, device)
    counts = decode_attention._arrivals(to_device(case, device).q.device, 16)  # five rows of two programs
    assert decode_attention._arrivals.cache_info().hits == 1
    assert not counts.any()
    counts[0] = 1  # as if one more of the five splits of the first row had come
    assert not torch.equal(run(paged_decode_attention, case, 0.25, device), first)
    counts.zero_()
    assert torch.equal(run(paged_decode_attention, case, 0.25, device), first)


def projected(case: PagedCache, device: torch.device, *, normed: bool = True) -> ProjectedHeads:
    """Heads for a decode step over this cache, in which the last key and value of each row are still garbage. Rows
    without keys have no slot, as padding has none.
    """
    _, block_size, num_kv_heads, head_dim = case.k_cache.shape
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(case.q.shape[0], case.q.shape[1] + 2 * num_kv_heads, head_dim, generator=generator)
    angles = torch.arange(400)[:, None] * 0.1 ** torch.linspace(0, 3, head_dim // 2)
    kv_lens = torch.tensor(case.rows.kv_lens)
    positions = (kv_lens - 1).clamp(min=0)
    blocks = case.rows.block_tables.cpu()[torch.arange(case.rows.num_rows), positions // block_size]
    slots = torch.where(kv_lens > 0, blocks.long() * block_size + positions % block_size, -1)
    norms = [(1 + 0.2 * torch.randn(head_dim, generator=generator)).to(device, case.q.dtype) for _ in range(2)]
    for cache in (case.k_cache, case.v_cache):
        cache.flatten(0, 1)[slots[slots >= 0].to(cache.device)] = torch.nan
    return ProjectedHeads(
        qkv.flatten(1).to(device, case.q.dtype),
        (norms[0], norms[1], 1e-2) if normed else None,
        torch.cat((angles.cos(), angles.sin()), dim=-1).to(device),
        positions.to(device),
        case.k_cache,
        case.v_cache,
        slots.to(device),
    )


def check_store_and_decode(case: PagedCache, device: torch.device, *, normed: bool = True) -> None:
    case = to_device(case, device)
    heads = projected(case, device, normed=normed)
    copies: dict[str, Any] = {n: x.cpu().clone() for n, x in heads._asdict().items() if isinstance(x, torch.Tensor)}
    on_host = heads._replace(**copies)
    if heads.qk_norm is not None:
        on_host = on_host._replace(qk_norm=(heads.qk_norm[0].cpu(), heads.qk_norm[1].cpu(), heads.qk_norm[2]))
    expected = reference.store_and_decode(on_host, to_device(case, torch.device("cpu")).rows, 0.125)
    assert_close(store_and_decode(heads, case.rows, 0.125).cpu(), expected)
    assert_close(heads.k_cache.cpu(), on_host.k_cache)
    assert_close(heads.v_cache.cpu(), on_host.v_cache)


@pytest.mark.parametrize("normed", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("split_tokens", [64, UNSPLIT])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 80), (38, 2, 16), (2, 1, 160)])
def test_storing_and_decoding_in_one_launch_is_both(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    split_tokens: int,
    normed: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows whose last key begins a block, a tile or a split, or is the only one."""
    split_every(monkeypatch, split_tokens)
    lens = [(1, kv_len) for kv_len in (133, 1, 17, 64, 65, 129, 33)]
    case = make_paged_cache(lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    check_store_and_decode(case, device, normed=normed)


@pytest.mark.parametrize("normed", [False, True], ids=["no norm", "norm"])
def test_heads_are_rounded_as_in_launches_of_their_own(normed: bool, device: torch.device) -> None:
    """Whole numbers, whose squares add up to the same in any order. The two other keys of a row are opposites across
    its query, so that the query's last bits choose between their values, 1 and 0; the new key is its query's opposite.
    """
    case = to_device(
        make_paged_cache([(1, 3)] * 5, num_heads=8, num_kv_heads=8, head_dim=64, dtype=torch.float16), device
    )
    heads = projected(case, device, normed=normed)
    generator = torch.Generator().manual_seed(4)
    q, v = (torch.randint(-9, 10, (5, 8, 64), generator=generator).to(device, torch.float16) for _ in range(2))
    norm = None if heads.qk_norm is None else (heads.qk_norm[0], heads.qk_norm[0], 1e-2)
    heads = heads._replace(qkv=torch.cat((q, -q, v), 1).flatten(1), qk_norm=norm)
    queries = qk_norm_rope_store_kv(*heads)
    across = torch.randn(5, 8, 64, generator=generator).to(device)
    wide = queries.float()
    across -= wide * (across * wide).sum(-1, keepdim=True) / (wide * wide).sum(-1, keepdim=True)
    first = case.rows.block_tables[:, 0].long()
    for offset, sign in ((0, 1), (1, -1)):
        case.k_cache[first, offset] = sign * across.half()
        case.v_cache[first, offset] = (1 + sign) / 2
    stored = case.k_cache.clone(), case.v_cache.clone()
    scale = 4096 / float(wide.norm(dim=-1).mean())
    expected = paged_decode_attention(queries, *stored, case.rows, scale)
    for cache in (case.k_cache, case.v_cache):
        cache[first, 2] = torch.nan
    found = store_and_decode(heads, case.rows, scale)
    assert_same_bits(case.k_cache[first, 2], stored[0][first, 2])
    assert_same_bits(case.v_cache[first, 2], stored[1][first, 2])
    assert float(((expected > 0.05) & (expected < 0.95)).double().mean()) > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


def test_a_row_without_a_slot_is_decoded_and_not_stored(device: torch.device) -> None:
    case = to_device(
        make_paged_cache([(1, 20), (1, 5)], num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32), device
    )
    heads = projected(case, device)
    heads.slot_mapping[0] = -1
    before = case.k_cache.clone(), case.v_cache.clone()
    store_and_decode(heads, case.rows, 0.25)
    for cache, old in zip((case.k_cache, case.v_cache), before, strict=True):
        written = (cache != old).any(-1).any(-1).flatten() & ~cache.isnan().any(-1).any(-1).flatten()
        assert written.nonzero().flatten().tolist() == [int(heads.slot_mapping[1])]


@pytest.mark.parametrize("split_tokens", [64, UNSPLIT])
def test_a_projected_row_without_keys_gets_zero(
    split_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As padding of a captured step is: the key projected for it is no key of its."""
    split_every(monkeypatch, split_tokens)
    case = make_paged_cache([(1, 70), (1, 0), (1, 5)], num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    check_store_and_decode(case, device)


def test_rows_that_share_a_prefix_are_stored_first(device: torch.device) -> None:
    case = make_paged_cache([(1, 40), (1, 40)], num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    case.rows.block_tables[1, 0] = case.rows.block_tables[0, 0]
    grouped = replace(case, rows=replace(case.rows, prefix_groups=(PrefixGroup(0, 2, 16),)))
    check_store_and_decode(grouped, device)


def test_no_rows_give_no_queries(device: torch.device) -> None:
    case = make_paged_cache([], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    assert run(paged_decode_attention, case, 1.0, device).shape == (0, 2, 16)
    assert run(paged_prefill_attention, case, 1.0, device).shape == (0, 2, 16)


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    case = make_paged_cache([(1, 70), (1, 3)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    for operation in (paged_decode_attention, paged_prefill_attention):
        check(operation, replace(case, q=case.q * 1e3), device, 1.0)
        check(operation, replace(case, q=case.q * 0 - 1e4, k_cache=case.k_cache.abs()), device, 1.0)


def test_a_nan_in_a_rows_own_keys_shows_in_that_row_only(device: torch.device) -> None:
    case = make_paged_cache([(1, 20), (1, 20)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    case.k_cache[int(case.rows.block_tables[0, 0]), 3] = torch.nan
    for operation in (paged_decode_attention, paged_prefill_attention):
        output = run(operation, case, 0.25, device)
        assert output[0].isnan().all()
        assert output[1].isfinite().all()


def test_scores_near_the_lowest_float_are_scores(device: torch.device) -> None:
    case = make_paged_cache([(1, 20)], num_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    case = replace(case, q=torch.full_like(case.q, 1e15), k_cache=torch.full_like(case.k_cache, -1e15))
    for operation in (paged_decode_attention, paged_prefill_attention):
        check(operation, case, device, 0.25)


def test_queries_and_caches_may_be_views_and_are_left_alone(dtype: torch.dtype, device: torch.device) -> None:
    case = make_paged_cache(DECODE, num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype)
    expected = reference.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.2)
    both = torch.stack((case.k_cache, case.v_cache), dim=1).to(device)  # [num_blocks, 2, block_size, Hkv, D]
    heads = torch.cat((torch.full_like(case.q, torch.nan), case.q), dim=1).to(device)  # as queries lie in a qkv
    dims = case.q.transpose(1, 2).contiguous().transpose(1, 2).to(device)
    before = [tensor.clone() for tensor in (both, heads, dims)]
    rows = to_device(case, device).rows
    for operation in (paged_decode_attention, paged_prefill_attention):
        for q in (heads[:, 4:], dims):
            assert_close(operation(q, both[:, 0], both[:, 1], rows, 0.2).cpu(), expected)
    for tensor, copy in zip((both, heads, dims), before, strict=True):
        assert_close(tensor, copy, max_steps=0, rms_steps=0)


def test_offsets_past_2_to_the_31_are_reached(device: torch.device, tmp_path: Path) -> None:
    lens = [(1, 64), (1, 3), (1, 5), (1, 64)]  # a full tile and a partly filled one
    case = make_paged_cache(lens, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float16, block_size=64)
    near = int(case.rows.block_tables[0, 0])  # every row reads this block
    case.rows.block_tables[:] = near
    expected = reference.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    storage = past_int32_storage(tmp_path, device)
    k_cache, v_cache = (storage.as_strided((4, 64, 1, 16), (FAR, 16, 16, 1), offset) for offset in (0, 1024))
    k_cache[3], v_cache[3] = case.k_cache[near].to(device), case.v_cache[near].to(device)
    q = storage.as_strided((4, 2, 16), (FAR, 16, 1), 2048)
    q.copy_(case.q)
    rows = to_device(case, device).rows
    rows.block_tables[:] = 3
    for operation in (paged_decode_attention, paged_prefill_attention):
        assert_close(operation(q, k_cache, v_cache, rows, 0.25).cpu(), expected)


def test_caches_of_different_layout_are_refused(device: torch.device) -> None:
    case = make_paged_cache([(1, 20)], num_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    other = case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    for operation in (paged_decode_attention, paged_prefill_attention):
        with pytest.raises(ValueError, match="cache strides"):
            run(operation, replace(case, v_cache=other), 1.0, device)


def test_decode_refuses_rows_with_several_queries(device: torch.device) -> None:
    case = make_paged_cache([(3, 9)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="3 queries for 1 rows"):
        run(paged_decode_attention, case, 1.0, device)


def test_host_lengths_may_be_bounds(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_paged_cache(DECODE, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    bounds = replace(case, rows=replace(case.rows, kv_lens=(1000,) * case.rows.num_rows))
    for splits in (DecodeSplits(3, 64), DecodeSplits(4, 128), DecodeSplits(2, 8192)):
        monkeypatch.setattr(decode_attention, "decode_splits", lambda *_, splits=splits: splits)
        check(paged_decode_attention, bounds, device, 0.25)


def test_chunking_and_batch_mates_do_not_change_a_bit_of_prefill(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matmul(a: Array, b: Array, dtype: Any) -> Array:
        product: Array = np.einsum("ik,kj->ij", a.astype(dtype), b.astype(dtype), optimize=False)
        return product

    # A GPU sums each row of a product alike; the BLAS below the interpreter does not.
    monkeypatch.setattr(np, "matmul", matmul)
    whole = make_paged_cache([(90, 90)], num_heads=2, num_kv_heads=1, head_dim=32, dtype=dtype)
    expected = run(paged_prefill_attention, whole, 0.2, device)
    mate = 3  # queries of a row before it, whose results are not looked at
    for start, end in ((0, 31), (31, 89), (89, 90)):
        rows = AttentionRows(
            block_tables=whole.rows.block_tables.repeat(2, 1),
            cu_seqlens_q=torch.tensor([0, mate, mate + end - start], dtype=torch.int32),
            seq_lens=torch.tensor([40, end], dtype=torch.int32),
            query_lens=(mate, end - start),
            kv_lens=(40, end),
        )
        chunk = replace(whole, q=torch.cat((whole.q[:mate], whole.q[start:end])), rows=rows)
        part = run(paged_prefill_attention, chunk, 0.2, device)
        assert_close(part[mate:], expected[start:end], max_steps=0, rms_steps=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (32, 8), (32, 4)])
def test_real_shapes_agree_with_the_cpu_implementation(num_heads: int, num_kv_heads: int, device: torch.device) -> None:
    options: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 128}
    for operation, expected, lens in (
        (paged_decode_attention, cpu.paged_decode_attention, [(1, 4096), (1, 333), (1, 9000), (1, 1)]),
        (paged_prefill_attention, cpu.paged_prefill_attention, [(512, 2048), (1, 700), (1000, 1000)]),
    ):
        case = make_paged_cache(lens, dtype=torch.bfloat16, **options)
        found = run(operation, case, 128**-0.5, device)
        output = expected(case.q.float(), case.k_cache.float(), case.v_cache.float(), case.rows, 128**-0.5)
        assert_close(found, output.bfloat16())
