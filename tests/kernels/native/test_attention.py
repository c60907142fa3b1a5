"""Native attention agrees with the reference, in every variant that has it and that this machine runs.

Caches of these tests hold NaN wherever no token is: past a row's length, in the null block, in blocks of nobody.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch

from kernels import cpu, reference
from kernels.native.attention import is_attended, paged_attention
from kernels.native.library import Kernels, load
from kernels.native.operations import NativeOperations, native_operations
from tests.support.tensors import PagedCache, assert_close, make_paged_cache, native_variants, needs_native

pytestmark = needs_native

DTYPES = [torch.float32, torch.bfloat16]
RAGGED = [(1, 133), (5, 18), (37, 37), (1, 1), (16, 48), (2, 2), (0, 40), (1, 16), (3, 20), (1, 17)]
DECODE = [(1, kv_len) for kv_len in (133, 1, 16, 17, 48, 0, 131, 15, 64)]
# 1 to 8 query heads a KV head, and more than a stream's 16 or a unit's 64 lanes take.
HEADS = [(4, 4), (4, 2), (3, 1), (8, 2), (5, 1), (12, 2), (7, 1), (16, 2), (9, 1), (16, 1), (17, 1), (71, 1)]
NUM_RANDOM_STEPS = 40

ATTENDING = [name for name in native_variants() if name.startswith(("avx512", "amx"))]


@pytest.fixture(params=ATTENDING)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each variant that attends in turn."""
    return load(request.param)


@pytest.fixture(params=ATTENDING)
def ops(request: pytest.FixtureRequest) -> NativeOperations:
    """The operations of each variant that attends."""
    return native_operations(request.param)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch's threads, which the kernels run on, are one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Step(NamedTuple):
    """A step's rows and the shape of its heads, hashable: the reference attends each step once for all variants."""

    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)  # of queries, of keys
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    groups: tuple[tuple[int, int, int], ...] = ()

    @property
    def scale(self) -> float:
        """Of a model's attention."""
        return float(self.head_dim**-0.5)


@cache
def prepared(step: Step) -> tuple[PagedCache, torch.Tensor]:
    """The step's tensors and what the reference makes of them."""
    case = make_paged_cache(
        list(step.lens),
        num_heads=step.heads[0],
        num_kv_heads=step.heads[1],
        head_dim=step.head_dim,
        dtype=step.dtype,
        block_size=step.block_size,
        seed=len(step.lens),
        prefix_groups=step.groups,
    )
    expected = reference.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, step.scale)
    return case, expected


def check(kernels: Kernels, step: Step, max_steps: float | None = None) -> None:
    case, expected = prepared(step)
    assert is_attended(case.q, case.k_cache, case.v_cache)
    actual = paged_attention(kernels, case.q, case.k_cache, case.v_cache, case.rows, step.scale)
    assert actual.is_contiguous()
    assert_close(actual, expected, max_steps=max_steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operations_are_the_kernels(ops: NativeOperations, dtype: torch.dtype) -> None:
    kernels = load(ops.variant)
    for attend, lens in ((ops.paged_decode_attention, DECODE), (ops.paged_prefill_attention, RAGGED)):
        case = make_paged_cache(lens, num_heads=4, num_kv_heads=2, head_dim=40, dtype=dtype)
        arguments = (case.q, case.k_cache, case.v_cache, case.rows, 0.25)
        assert torch.equal(attend(*arguments), paged_attention(kernels, *arguments))


def test_attention_is_native_from_avx512_on() -> None:
    for name in native_variants():
        module = native_operations(name).paged_decode_attention.__module__
        assert module == ("kernels.native.operations" if name in ATTENDING else "kernels.cpu.attention")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_ragged_chunks_agree_with_the_reference(kernels: Kernels, heads: tuple[int, int], dtype: torch.dtype) -> None:
    check(kernels, Step(tuple(RAGGED), heads, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_ragged_decode_agrees_with_the_reference(kernels: Kernels, heads: tuple[int, int], dtype: torch.dtype) -> None:
    check(kernels, Step(tuple(DECODE), heads, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 72, 80, 96, 104, 128, 136, 192, 248, 256])
def test_every_head_dim_agrees_with_the_reference(kernels: Kernels, head_dim: int, dtype: torch.dtype) -> None:
    check(kernels, Step(((1, 33), (5, 18), (9, 9), (1, 14)), (6, 2), head_dim, dtype))


@pytest.mark.parametrize("block_size", [1, 4, 8, 24, 32, 256])
def test_every_block_size_agrees_with_the_reference(kernels: Kernels, block_size: int) -> None:
    check(kernels, Step(((1, 41), (7, 30), (1, 300)), dtype=torch.bfloat16, block_size=block_size))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_that_takes_several_rounds_of_keys_agrees(kernels: Kernels, dtype: torch.dtype) -> None:
    check(kernels, Step(((70, 600), (30, 257), (130, 130)), (4, 2), 32, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_4096_decode_rows_agree_with_the_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    check(kernels, Step(tuple((1, row % 37) for row in range(4096)), (2, 1), 8, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_of_4096_tokens_agrees_with_the_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    # Of 65,536 sums over up to 4,096 keys one or two are 66 to 70 steps of float32 off, with each order of summing.
    check(kernels, Step(((4096, 4096),), (2, 1), 8, dtype), max_steps=128 if dtype is torch.float32 else None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_row_is_merged_from_parts(kernels: Kernels, dtype: torch.dtype) -> None:
    check(kernels, Step(((1, 1500), (1, 3)), (4, 2), 32, dtype))


def test_a_long_row_on_one_thread_agrees(kernels: Kernels, one_thread: None) -> None:
    check(kernels, Step(((1, 1500), (1, 3)), (4, 2), 32, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_prefixes_agree_with_rows_that_share_none(kernels: Kernels, dtype: torch.dtype) -> None:
    decode = ((1, 200), (1, 129), (1, 140), (1, 7), (1, 80), (1, 65))
    groups = ((0, 3, 128), (4, 2, 64))
    check(kernels, Step(decode, (8, 2), 64, dtype, groups=groups))
    chunks = ((40, 200), (2, 130), (0, 140), (5, 7), (17, 81), (1, 65))
    check(kernels, Step(chunks, (8, 2), 64, dtype, groups=groups))


def random_step(seed: int) -> Step:
    """Any mixture of rows, heads, sizes and groups."""
    draw = random.Random(seed)
    block_size = draw.choice([1, 4, 8, 16, 16, 16, 32, 64])
    num_kv_heads, group = draw.choice([1, 2, 3, 8]), draw.choice([1, 2, 3, 4, 6, 7, 8, 9, 16, 20])
    query_lens = [1] if draw.random() < 0.5 else [0, 1, 1, 2, 5, 17, 40, 70]
    lens = []
    for _ in range(draw.randint(0, 6)):
        query_len = draw.choice(query_lens)
        lens.append((query_len, query_len + draw.choice([0, 0, 1, 15, 16, 17, 63, 64, 127, 128, 300])))
    groups: list[tuple[int, int, int]] = []
    if len(lens) >= 3 and draw.random() < 0.5:
        shared = block_size * draw.randint(1, max(1, 150 // block_size))
        lens = [(query_len, kv_len + shared) for query_len, kv_len in lens]
        groups = [(0, 2, shared), (2, len(lens) - 2, shared)] if len(lens) > 3 else [(1, 2, shared)]
    heads = (num_kv_heads * group, num_kv_heads)
    dtype = draw.choice(DTYPES)
    return Step(tuple(lens), heads, 8 * draw.randint(1, 32), dtype, block_size, tuple(groups))


@pytest.mark.parametrize("seed", range(NUM_RANDOM_STEPS))
def test_random_steps_agree_with_the_reference(kernels: Kernels, seed: int) -> None:
    check(kernels, random_step(seed))


def test_no_rows_give_no_queries(ops: NativeOperations) -> None:
    case = make_paged_cache([], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    assert ops.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 1.0).shape == (0, 2, 16)
    assert ops.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, 1.0).shape == (0, 2, 16)


def test_a_row_without_keys_gets_zero(kernels: Kernels) -> None:
    case = make_paged_cache([(1, 5), (1, 0)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    output = paged_attention(kernels, case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    assert output[0].abs().min() > 0
    assert (output[1] == 0).all()


def test_decode_refuses_rows_with_several_queries(ops: NativeOperations) -> None:
    case = make_paged_cache([(3, 9)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="3 queries for 1 rows"):
        ops.paged_decode_attention(case.q, case.k_cache, case.v_cache, case.rows, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_a_nan_in_a_rows_own_keys_shows_in_that_row_only(
    kernels: Kernels, which: str, query_len: int, dtype: torch.dtype
) -> None:
    lens = [(query_len, 40), (query_len, 40)]
    case = make_paged_cache(lens, num_heads=4, num_kv_heads=2, head_dim=16, dtype=dtype)
    getattr(case, which)[int(case.rows.block_tables[0, 1]), 3] = torch.nan
    output = paged_attention(kernels, case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    assert output[:query_len].isnan().all()
    assert output[query_len:].isfinite().all()


def test_attention_leaves_queries_and_caches_alone(kernels: Kernels) -> None:
    case = make_paged_cache(RAGGED, num_heads=4, num_kv_heads=2, head_dim=40, dtype=torch.bfloat16)
    before = [tensor.clone() for tensor in (case.q, case.k_cache, case.v_cache)]
    paged_attention(kernels, case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    for tensor, copy in zip((case.q, case.k_cache, case.v_cache), before, strict=True):
        assert torch.equal(tensor.view(torch.int16), copy.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_queries_and_caches_are_read_by_their_strides(kernels: Kernels, dtype: torch.dtype) -> None:
    case = make_paged_cache(RAGGED, num_heads=4, num_kv_heads=2, head_dim=40, dtype=dtype)
    expected = paged_attention(kernels, case.q, case.k_cache, case.v_cache, case.rows, 0.25)

    def spread(x: torch.Tensor) -> torch.Tensor:
        """The same values, NaN between heads, tokens and blocks, at odd addresses."""
        sizes = [size + 1 for size in x.shape]
        buffer = torch.full((*sizes[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
        view = buffer[(slice(1, None),) * (x.dim() - 1) + (slice(1, x.shape[-1] + 1),)]
        return view.copy_(x)

    q, k_cache, v_cache = spread(case.q), spread(case.k_cache), spread(case.v_cache)
    assert torch.equal(paged_attention(kernels, q, k_cache, v_cache, case.rows, 0.25), expected)


def test_scores_far_from_zero_neither_overflow_nor_vanish(kernels: Kernels) -> None:
    case = make_paged_cache([(1, 400), (9, 300)], num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float32)
    arguments = (case.q * 30, case.k_cache, case.v_cache, case.rows, 1.0)
    assert_close(paged_attention(kernels, *arguments), reference.paged_prefill_attention(*arguments), max_steps=4096)
    # A scale that is no power of two: a score may differ from the largest, itself, by half a step of billions.
    for factor in (1e9, 3e10):
        out = paged_attention(kernels, case.q * factor, case.k_cache, case.v_cache, case.rows, 0.1375)
        assert out.isfinite().all()


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(12, torch.float32), (264, torch.bfloat16), (64, torch.float16)], ids=str
)
def test_what_the_kernels_do_not_take_is_pytorchs(ops: NativeOperations, head_dim: int, dtype: torch.dtype) -> None:
    lens = [(3, 20), (1, 17)]
    case = make_paged_cache(lens, num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    arguments = (case.q, case.k_cache, case.v_cache, case.rows, 0.25)
    assert not is_attended(*arguments[:3])
    assert torch.equal(ops.paged_prefill_attention(*arguments), cpu.paged_prefill_attention(*arguments))


def test_caches_of_unequal_strides_are_pytorchs() -> None:
    case = make_paged_cache([(1, 20)], num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    heads_first = case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    assert not is_attended(case.q, case.k_cache, heads_first)
