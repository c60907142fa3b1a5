"""Makes tensors for tests of the kernels and compares what was computed with what was expected.

Paged caches have known contents and poison around them. One comparison is strict enough to fail and says where it did;
another finds a rounding that was left out: too small for the first, too frequent for chance. Products with weights of
8 bits are computed in plain integers; `kernels.int8` must give the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kernels import reference
from kernels.interface import KernelsUnavailable
from kernels.native import library
from kernels.native.library import TruncateArgs, pointer
from kernels.operands import AttentionRows, ExpertLayout, PrefixGroup, RoutedExperts, Truncation
from kernels.quantised import QuantisedWeight, WeightScheme, pack_nibbles
from kernels.reference.sampling import gumbel_noise

# Allowed error of one element, in units of the dtype's rounding step `eps` times the larger of |expected| and the RMS
# of all of it (an element near zero is the difference of terms as large as its neighbours, so it carries their error).
# float32: both sides sum the same terms in different orders; sums of up to 10^4 terms differ by a few dozen eps.
# bfloat16, float16: sums are in float32, so what is left is rounding: half a step on each side, and the same again for
# an intermediate result that one side rounds (probabilities before P @ V, silu before its product) and one does not.
_MAX_STEPS = {torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}
# Allowed RMS of the error in the same steps, relative to the RMS of `expected`. Random rounding of two values gives
# 0.4 steps; one step in every element is a bias, and a defect, even where each element alone would pass.
_RMS_STEPS = {torch.float32: 8.0, torch.bfloat16: 1.0, torch.float16: 1.0}

# Sums in another order, and a reciprocal root good to 2 steps of float32, round about one element of a thousand the
# other way, to 11 bits or fewer. A rounding left out changes one element of four.
_MAX_DIFFERENT = 0.02

# (tokens, experts, experts per token): one token, odd numbers, more experts than pairs (so most take none).
SHAPES = [(1, 8, 2), (13, 5, 3), (3, 128, 8), (21, 4, 4)]

# `make sanitize` has its own build of them, and only that process loads it.
if path := os.environ.get("TESTED_NATIVE_LIBRARY"):
    library.LIBRARY = Path(path).resolve(strict=True)


def native_variants() -> tuple[str, ...]:
    """The variants of the native kernels that this build has and this machine runs; none without a compiler."""
    try:
        return library.available()
    except KernelsUnavailable:
        return ()


def truncated_natively(variant: str, logits: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """The logits [N, V] float32 with -inf for what is dropped: the half of `choose_tokens` that chooses nothing.

    Rows that hold a NaN or +inf, or -inf alone, stay as they are.
    """
    masked = in_poison(logits)
    arguments = TruncateArgs(masked.data_ptr(), masked.stride(0), *masked.shape, *map(pointer, truncation))
    library.load(variant).truncate(byref(arguments))
    return masked


needs_native = pytest.mark.skipif(not native_variants(), reason="the native kernels were not built")
needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="needs a CPU with AVX-512 VNNI")


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, max_steps: float | None = None, rms_steps: float | None = None
) -> None:
    """Raise AssertionError unless shape, dtype, NaNs, infinities and values agree; integers must be equal.

    max_steps, rms_steps: bounds in place of the dtype's, for a test that has a reason.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{tuple(actual.shape)} {actual.dtype} where {tuple(expected.shape)} {expected.dtype} was expected"
        )
    if actual.numel() == 0:
        return
    if not actual.dtype.is_floating_point:
        _raise_at(actual != expected, actual, expected, "differs")
        return
    _raise_at(actual.isnan() != expected.isnan(), actual, expected, "NaN on one side only")
    infinite = actual.isinf() | expected.isinf()
    _raise_at(infinite & (actual != expected), actual, expected, "infinity on one side only")
    finite = expected.isfinite()
    wide, error = expected.double(), (actual.double() - expected.double()).abs()
    wide, error = torch.where(finite, wide, 0.0), torch.where(finite, error, 0.0)
    num_finite = max(int(finite.sum()), 1)
    scale = float(wide.square().sum() / num_finite) ** 0.5
    rms_error = float(error.square().sum() / num_finite) ** 0.5
    eps = torch.finfo(expected.dtype).eps
    max_steps = _MAX_STEPS[expected.dtype] if max_steps is None else max_steps
    rms_steps = _RMS_STEPS[expected.dtype] if rms_steps is None else rms_steps
    summary = f"worst error {float(error.max()):.3g}, RMS error {rms_error:.3g}, RMS expected {scale:.3g}"
    _raise_at(error > max_steps * eps * wide.abs().clamp(min=scale), actual, expected, summary, worst_by=error)
    if rms_error > rms_steps * eps * scale:
        raise AssertionError(f"{summary}: RMS error above {rms_steps} steps of {eps:.3g}")


def _raise_at(
    wrong: torch.Tensor,
    actual: torch.Tensor,
    expected: torch.Tensor,
    message: str,
    worst_by: torch.Tensor | None = None,
) -> None:
    if not wrong.any():
        return
    weight = wrong.double() if worst_by is None else torch.where(wrong, worst_by, 0.0)
    index = tuple(int(i) for i in torch.unravel_index(weight.argmax(), wrong.shape))
    raise AssertionError(
        f"{message}; at {index}: {actual[index].item()!r} where {expected[index].item()!r} was expected "
        f"({int(wrong.sum())} of {wrong.numel()} elements)"
    )


def equal_scores(first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [1, 2500], seed and position [1] by which token `first` and the third behind it have equal scores, the
    highest: the latter's logit is higher by as much as its noise is lower.
    """
    second = first + 3
    for seed in range(9999):  # of few the difference is one that float32 holds
        noise = torch.tensor([gumbel_noise(seed, 7, first), gumbel_noise(seed, 7, second)])
        if 4 > noise[0] > noise[1] > 2 and noise[1] - noise[0] + noise[0] == noise[1]:
            break
    logits = torch.full((1, 2500), -60.0)
    logits[0, [first, second]] = torch.stack((noise[1] - noise[0], torch.tensor(0.0)))
    assert noise[0] > logits[0, first] + noise[0] == noise[1] > 2
    return logits, torch.tensor([seed]), torch.tensor([7])


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise AssertionError unless all but 2% of the elements are equal."""
    different = float((actual != expected).double().mean())
    if different > _MAX_DIFFERENT:
        raise AssertionError(f"{different:.1%} of {expected.numel()} elements differ; accepted: {_MAX_DIFFERENT:.0%}")


@dataclass(frozen=True)
class PagedCache:
    """Caches in which every slot that belongs to no token is NaN, the rows that use them, and their queries."""

    q: torch.Tensor  # [sum of query_lens, Hq, D]
    k_cache: torch.Tensor  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor
    rows: AttentionRows

    def without_groups(self) -> PagedCache:
        """The same rows over the same blocks, their shared beginnings not pointed out."""
        return replace(self, rows=replace(self.rows, prefix_groups=()))


def make_paged_cache(
    lens: list[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    seed: int = 0,
    prefix_groups: Sequence[tuple[int, int, int]] = (),
) -> PagedCache:
    """lens: (query_len, kv_len) of each row. Blocks are handed out in random order; the null block holds NaN.

    prefix_groups: (first_row, num_rows, num_tokens); members of one begin with the blocks of its first row.
    """
    groups = tuple(PrefixGroup(*group) for group in prefix_groups)
    check_prefix_groups(groups, lens, block_size)
    generator = torch.Generator().manual_seed(seed)
    num_used = [-(-kv_len // block_size) for _, kv_len in lens]
    num_blocks = sum(num_used) + 3
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    block_tables = torch.zeros(len(lens), max(num_used, default=0) + 1, dtype=torch.int32)
    for row, (_, kv_len) in enumerate(lens):
        shared = _share_blocks(block_tables, groups, row, block_size)
        for index in range(shared, num_used[row]):
            block = free.pop()
            block_tables[row, index] = block
            filled = min(block_size, kv_len - index * block_size)
            for cache in (k_cache, v_cache):
                cache[block, :filled] = torch.randn(filled, num_kv_heads, head_dim, generator=generator)
    query_lens = tuple(query_len for query_len, _ in lens)
    q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator)
    return PagedCache(
        q=q.to(dtype),
        k_cache=k_cache.to(dtype),
        v_cache=v_cache.to(dtype),
        rows=AttentionRows(
            block_tables=block_tables,
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor([kv_len for _, kv_len in lens], dtype=torch.int32),
            query_lens=query_lens,
            kv_lens=tuple(kv_len for _, kv_len in lens),
            prefix_groups=groups,
        ),
    )


def with_window(case: PagedCache, window: int) -> PagedCache:
    """The same with a window, where blocks that no query sees are gone: the null block stands in their place."""
    rows = case.rows.windowed(window)
    tables = rows.block_tables.clone()
    for row in range(rows.num_rows):
        tables[row, : rows.first_key(row) // case.k_cache.shape[1]] = 0
    return replace(case, rows=replace(rows, block_tables=tables))


def with_scores(case: PagedCache, soft_cap: float | None, has_sinks: bool) -> PagedCache:
    """The same with scores that are capped, and with sinks, as large as a head's largest score, of both signs."""
    sinks = torch.randn(case.q.shape[1], generator=torch.Generator().manual_seed(5)) * 3 if has_sinks else None
    return replace(case, rows=replace(case.rows, soft_cap=soft_cap, sinks=sinks))


def check_prefix_groups(groups: Sequence[PrefixGroup], lens: Sequence[tuple[int, int]], block_size: int) -> None:
    """Check groups against what `PrefixGroup` and `AttentionRows.prefix_groups` promise.

    lens: as in `make_paged_cache`.
    """
    end = 0
    for group in groups:
        assert group.first_row >= end, f"{group} begins before row {end}"
        end = group.first_row + group.num_rows
        assert group.num_rows >= 2
        assert end <= len(lens), f"{group} ends after row {len(lens)}"
        assert group.num_tokens > 0
        assert group.num_tokens % block_size == 0
        for query_len, kv_len in lens[group.first_row : end]:
            assert group.num_tokens <= kv_len - query_len, f"{group} is longer than what lies before a member's queries"


def _share_blocks(block_tables: torch.Tensor, groups: Sequence[PrefixGroup], row: int, block_size: int) -> int:
    """Write the blocks that a row shares with the first of its group; how many there are."""
    for group in groups:
        if group.first_row < row < group.first_row + group.num_rows:
            num_blocks = group.num_tokens // block_size
            block_tables[row, :num_blocks] = block_tables[group.first_row, :num_blocks]
            return num_blocks
    return 0


def randn(
    *shape: int, seed: int = 0, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Normally distributed values, the same on every device and rounded to dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def framed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view into a larger buffer of NaN: a wrong stride or a missing mask reads one."""
    buffer = tensor.new_full((*tensor.shape[:-2], tensor.shape[-2] + 2, tensor.shape[-1] + 8), torch.nan)
    view = buffer[..., : tensor.shape[-2], : tensor.shape[-1]]
    return view.copy_(tensor)


def in_longer_rows(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values [n, m] on a device, as a view into rows that go on with NaN."""
    buffer = tensor.new_full((tensor.shape[0], tensor.shape[1] + 9), torch.nan).to(device)
    return buffer[:, : tensor.shape[1]].copy_(tensor)


def in_poison(x: torch.Tensor) -> torch.Tensor:
    """A view with the values of x [n, m] among NaN: rows further apart than they are long, and not aligned."""
    buffer = torch.full((x.shape[0] + 2, x.shape[1] + 5), torch.nan, dtype=x.dtype)
    return buffer[1:-1, 3:-2].copy_(x)


def random_quantised(
    scheme: WeightScheme, shape: tuple[int, ...], *, is_reordered: bool, scale_dtype: torch.dtype = torch.bfloat16
) -> QuantisedWeight:
    """Any values, the extreme ones too, and scales and zero points that differ from group to group."""
    *lead, rows, width = shape
    generator = torch.Generator().manual_seed(rows + width)
    grid = (*lead, -(-rows // (scheme.block_rows or 1)), -(-width // (scheme.group_size or width)))
    low, high = (0, 16) if scheme.bits == 4 else (-128, 128)
    values = torch.randint(low, high, shape, generator=generator)
    if scheme.bits == 4:
        values = pack_nibbles(values)
    elif scheme.is_float:
        values = (torch.randn(shape, generator=generator) * 50).to(torch.float8_e4m3fn)
    else:
        values = values.to(torch.int8)
    zeros = torch.randint(low, high, grid, generator=generator).to(torch.uint8 if scheme.bits == 4 else torch.int8)
    scales = (torch.rand(grid, generator=generator) * 0.01 + 1e-4).to(scale_dtype)
    order = torch.argsort(torch.rand(*lead, width, generator=generator), dim=-1) if is_reordered else None
    return QuantisedWeight(scheme, values, scales, None if scheme.symmetric else zeros, order)


def expert_weights(
    num_experts: int, rows: int, depth: int, device: torch.device, dtype: torch.dtype, seed: int = 4
) -> torch.Tensor:
    return framed(
        randn(num_experts, rows, depth, seed=seed, device=device, dtype=torch.float32).div(depth**0.5).to(dtype)
    )


def routing(num_tokens: int, num_experts: int, top_k: int, device: torch.device, seed: int = 3) -> RoutedExperts:
    routed = reference.route_topk(
        randn(num_tokens, num_experts, seed=seed, device=torch.device("cpu")), top_k, renormalise=True
    )
    return RoutedExperts(routed.weights.to(device), routed.expert_ids.to(device))


def layout_of(expert_ids: torch.Tensor, num_experts: int) -> ExpertLayout:
    layout = reference.sort_tokens_by_expert(expert_ids.cpu(), num_experts)
    return ExpertLayout(
        layout.pair_ids.to(expert_ids.device), layout.expert_offsets.to(expert_ids.device), layout.top_k
    )


def on_cpu(layout: ExpertLayout) -> ExpertLayout:
    return ExpertLayout(layout.pair_ids.cpu(), layout.expert_offsets.cpu(), layout.top_k)


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, K] -> int64 in -127 to 127 [n, K] and float32 scales [n, 1], a row's largest magnitude being 127."""
    largest = rows.float().abs().amax(1, keepdim=True)
    integers = torch.where(largest > 0, rows.float() * (127 / largest), 0.0).round().long()
    return integers, largest * (1 / 127)


def rounded_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> int64 [N, K] and float32 scales [N, 1], by division."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return torch.where(scales > 0, weight.float() / scales, 0.0).round().long(), scales


def int8_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N] in x's dtype: one integer sum, two scales, one rounding to the dtype."""
    x_integers, x_scales = rounded(x)
    integers, scales = rounded_weight(weight)
    return ((x_integers @ integers.T).float() * scales.T * x_scales).to(x.dtype)


def merge_by_definition(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> torch.Tensor:
    """Attention over two sets of keys from the attention over each, one query and head at a time.

    Outputs [N, Hq, D], natural log-sum-exps [N, Hq]. A NaN in either shows in the result.
    """
    output = torch.zeros_like(first)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in first_lse.shape)):
        place = tuple(index.tolist())
        pair = torch.stack((first_lse[place], second_lse[place]))
        if (pair == -torch.inf).all():
            continue
        shares = torch.softmax(pair, dim=0)
        output[place] = shares[0] * first[place].float() + shares[1] * second[place].float()
    return output
