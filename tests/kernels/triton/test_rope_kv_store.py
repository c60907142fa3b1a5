"""The Triton kernel that rotates queries and keys and stores keys and values agrees with the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import reference
from kernels.triton.rope_kv_store import qk_norm_rope_store_kv
from tests.support.devices import past_int32_storage
from tests.support.tensors import assert_close, assert_same_bits

pytestmark = pytest.mark.usefixtures("guarded_memory")

NUM_BLOCKS = 3
MAX_POSITIONS = 50
EPS = 1e-6
Store = Callable[..., torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, k_cache, v_cache
# (num_heads, num_kv_heads, head_dim, block_size): heads that fill a tile and that do not, several tiles of keys
SHAPES = [(4, 4, 64, 16), (8, 2, 80, 8), (4, 2, 96, 16), (12, 3, 128, 16), (10, 10, 128, 16), (5, 1, 256, 16)]


class Case:
    """Inputs on the CPU; the caches hold NaN wherever nothing is written."""

    def __init__(
        self, num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, *, normed: bool = True
    ) -> None:
        num_heads, num_kv_heads, head_dim, block_size = shape
        generator = torch.Generator().manual_seed(num_tokens)
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = torch.randn(num_tokens, width, generator=generator).to(dtype)
        angles = torch.arange(MAX_POSITIONS)[:, None] * 0.1 ** torch.linspace(0, 3, head_dim // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.positions = torch.randint(MAX_POSITIONS, (num_tokens,), generator=generator)
        self.slots = torch.randperm(NUM_BLOCKS * block_size, generator=generator)[:num_tokens]
        weights = [(1 + 0.2 * torch.randn(head_dim, generator=generator)).to(dtype) for _ in range(2)]
        self.norm = (weights[0], weights[1], EPS) if normed else None
        self.caches = torch.full((NUM_BLOCKS, 2, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)

    def expected(self) -> Result:
        caches = self.caches.clone()
        return self.run(reference.qk_norm_rope_store_kv, torch.device("cpu"), caches[:, 0], caches[:, 1])

    def actual(self, device: torch.device) -> Result:
        caches = self.caches.to(device).movedim(1, 0).contiguous()
        return self.run(qk_norm_rope_store_kv, device, caches[0], caches[1])

    def actual_with_interleaved_caches(self, device: torch.device) -> Result:
        caches = self.caches.to(device, copy=True)
        return self.run(qk_norm_rope_store_kv, device, caches[:, 0], caches[:, 1])

    def run(
        self,
        store: Store,
        device: torch.device,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> Result:
        norm = self.norm and (self.norm[0].to(device), self.norm[1].to(device), self.norm[2])
        qkv, cos_sin = self.qkv.to(device), self.cos_sin.to(device)
        positions, slots = self.positions.to(device), self.slots.to(device)
        queries = store(qkv, norm, cos_sin, positions, k_cache, v_cache, slots)
        return queries.cpu(), k_cache.cpu(), v_cache.cpu()


def assert_same(actual: Result, expected: Result) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("normed", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}-{shape[1]}x{shape[2]}")
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_queries_keys_and_values_agree_with_the_reference(
    num_tokens: int, shape: tuple[int, int, int, int], normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(num_tokens, shape, dtype, normed=normed)
    assert_same(case.actual(device), case.expected())


def test_results_are_rounded_where_the_reference_rounds(dtype: torch.dtype, device: torch.device) -> None:
    if dtype is torch.float32:
        pytest.skip("nothing is rounded between")
    case = Case(9, (4, 2, 128, 16), dtype)
    for actual, expected in zip(case.actual(device), case.expected(), strict=True):
        assert_same_bits(actual.nan_to_num(), expected.nan_to_num())


def test_a_negative_slot_writes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(9, (4, 2, 64, 16), dtype)
    case.slots[3] = case.slots[6] = -1
    case.slots[8] = -17
    actual = case.actual(device)
    assert_same(actual, case.expected())
    assert int(actual[1][..., 0, 0].isnan().logical_not().sum()) == 6
    assert not actual[0].isnan().any()


def test_values_are_copied_bit_for_bit_with_their_nans(device: torch.device) -> None:
    case = Case(3, (4, 2, 64, 16), torch.float32)
    case.qkv[1, -64:] = torch.nan
    case.qkv[2, -1] = torch.inf
    _, _, v_cache = case.actual(device)
    written = v_cache.flatten(0, 1)[case.slots].flatten(1)
    assert torch.equal(written.nan_to_num(nan=5.0), case.qkv[:, -128:].nan_to_num(nan=5.0))


def test_a_head_with_a_nan_spoils_no_other(device: torch.device) -> None:
    case = Case(3, (4, 2, 64, 16), torch.float32)
    case.qkv[1, :64] = torch.nan
    queries, k_cache, _ = case.actual(device)
    assert queries[1, 0].isnan().all()
    assert queries.isnan().sum() == 64
    assert not k_cache.flatten(0, 1)[case.slots].isnan().any()


def test_caches_may_lie_interleaved(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(7, (4, 2, 80, 16), dtype)
    assert_same(case.actual_with_interleaved_caches(device), case.expected())


def test_the_packed_projection_may_be_part_of_a_wider_one_and_stays(device: torch.device) -> None:
    case = Case(5, (4, 2, 64, 16), torch.float32)
    wide = torch.cat((case.qkv, torch.full((5, 48), torch.nan)), dim=1).to(device)
    expected = case.expected()
    before = wide.clone()
    case.qkv = wide[:, :-48]
    assert_same(case.actual(device), expected)
    assert torch.equal(wide.nan_to_num(nan=3.0), before.nan_to_num(nan=3.0))


def test_a_head_whose_elements_lie_apart_is_refused(device: torch.device) -> None:
    case = Case(4, (4, 2, 64, 16), torch.float32)
    case.qkv = case.qkv.t().contiguous().t()
    with pytest.raises(ValueError, match=r"qkv has strides \(1, 4\)"):
        case.actual(device)


def test_a_cache_may_be_larger_than_an_int32_counts(tmp_path: Path, device: torch.device) -> None:
    case = Case(4, (2, 1, 64, 16), torch.float16)
    case.slots = torch.tensor([2 * 16 + 3, 5, 16 + 15, 2 * 16 + 15])
    far = past_int32_storage(tmp_path, device).as_strided((3, 16, 1, 64), (2**30 + 16, 64, 64, 1))
    near = torch.zeros(3, 16, 1, 64, dtype=torch.float16, device=device)
    expected_k, expected_v = (near.cpu().clone() for _ in range(2))
    expected = case.run(reference.qk_norm_rope_store_kv, torch.device("cpu"), expected_k, expected_v)
    for k_cache, v_cache in ((far, near.clone()), (near.clone(), far)):
        far.zero_()
        assert_same(case.run(qk_norm_rope_store_kv, device, k_cache, v_cache), expected)


def test_no_tokens_are_no_work(dtype: torch.dtype, device: torch.device) -> None:
    case = Case(0, (4, 2, 64, 16), dtype)
    queries, k_cache, v_cache = case.actual(device)
    assert queries.shape == (0, 4, 64)
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="real sizes are for a GPU")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (32, 8), (32, 4)])
def test_real_sizes_agree_with_the_reference(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    case = Case(40, (num_heads, num_kv_heads, 128, 16), dtype)
    assert_same(case.actual(torch.device("cuda")), case.expected())
