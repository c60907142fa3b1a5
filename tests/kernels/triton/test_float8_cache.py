"""Keys and values in float8 e4m3: stored as by the reference, but for a zero's sign, and attended as it does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.checkpoint.weights import Checkpoint
from engine.execution.batch import ForwardItem, plan_batch
from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors
from engine.models.decoder import DecoderLayer, DecoderModel
from engine.models.load import load_decoder
from engine.models.placement import ModelPlacement
from engine.staging import ArrayStaging
from kernels import cpu, deterministic, reference, triton
from kernels.interface import Operations
from kernels.native.operations import native_operations
from kernels.operands import ProjectedHeads
from kernels.reference.layers import as_float8
from kernels.triton import decode_attention
from kernels.triton.attention_launch import DecodeSplits
from kernels.triton.decode_attention import paged_decode_attention, store_and_decode
from kernels.triton.prefill_attention import paged_prefill_attention
from kernels.triton.rope_kv_store import qk_norm_rope_store_kv
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.tensors import PagedCache, assert_close, make_paged_cache, native_variants, randn, with_window
from tests.support.tiny_checkpoint import decoder_config, make_checkpoint
from tests.support.tiny_families import Family

FLOAT8 = torch.float8_e4m3fn
Operation = Callable[..., torch.Tensor]
DECODE = [(1, kv_len) for kv_len in (133, 1, 17, 0, 64)]
CHUNKS = [(1, 133), (5, 18), (37, 37), (1, 1), (3, 70)]


@pytest.fixture(autouse=True)
def gpu_converts_float8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not convert e4m3")


def scales_of(num_kv_heads: int) -> torch.Tensor:
    """[2, Hkv]: no two alike, no powers of two, keys and values apart."""
    heads = torch.arange(num_kv_heads)
    return torch.stack((0.011 * (1 + heads), 0.29 / (1 + heads)))


def in_float8(case: PagedCache) -> PagedCache:
    """The case with rounded caches, NaN where they are unused."""
    scales = scales_of(case.k_cache.shape[2])
    k_cache, v_cache = (as_float8(c, s[:, None]) for c, s in zip((case.k_cache, case.v_cache), scales, strict=True))
    return replace(case, k_cache=k_cache, v_cache=v_cache, rows=case.rows.scaled(scales))


def case_of(lens: list[tuple[int, int]], heads: tuple[int, int], dtype: torch.dtype, **options: Any) -> PagedCache:
    options = {"head_dim": 64, **options}
    return in_float8(make_paged_cache(lens, num_heads=heads[0], num_kv_heads=heads[1], dtype=dtype, **options))


def check(operation: Operation, case: PagedCache, device: torch.device) -> None:
    expected = reference.paged_prefill_attention(case.q, case.k_cache, case.v_cache, case.rows, 0.125)
    names = ("block_tables", "cu_seqlens_q", "seq_lens", "kv_scales")
    rows = replace(case.rows, **{name: getattr(case.rows, name).to(device) for name in names})
    q, k_cache, v_cache = (tensor.to(device) for tensor in (case.q, case.k_cache, case.v_cache))
    assert_close(operation(q, k_cache, v_cache, rows, 0.125).cpu(), expected)


def split_every(monkeypatch: pytest.MonkeyPatch, split_tokens: int) -> None:
    monkeypatch.setattr(
        decode_attention,
        "decode_splits",
        lambda _, kv_len, __: DecodeSplits(-(-max(kv_len, 1) // split_tokens), split_tokens),
    )


def test_rounding_is_to_the_nearest_and_to_the_even_of_two() -> None:
    """Against all 253 finite numbers of e4m3, between and beyond which these lie, halfway and not."""
    every = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    finite = torch.tensor(sorted({*every[every.isfinite()].tolist()}))
    between = (finite[1:] + finite[:-1]) / 2
    x = torch.cat((finite, between, between * 1.0001, between * 0.9999, torch.tensor([460.0, -464.1, 500, 1e30])))
    rounded = as_float8(x, torch.tensor(1.0)).float()
    distances = (x.clamp(-448, 448)[:, None] - finite).abs()
    assert torch.equal((rounded - x.clamp(-448, 448)).abs(), distances.amin(1))
    bits = as_float8(between, torch.tensor(1.0)).view(torch.uint8)
    assert bool((bits % 2 == 0).all())  # e4m3's last bit, of the even of two neighbours
    broken = as_float8(torch.tensor([torch.nan, torch.inf, -torch.inf]), torch.tensor(1.0))
    assert bool(broken.float().isnan().all())


def stored(
    store: Operation,
    qkv: torch.Tensor,
    device: torch.device,
    *,
    normed: bool = False,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Queries, and the bytes of both caches of 3 blocks, 3 KV heads of 64 dims; slots 5, 40 and none are written."""
    weights = [(1 + 0.2 * randn(64, seed=seed, device=device)).to(qkv.dtype) for seed in (3, 4)]
    angles = torch.arange(9)[:, None] * 0.1 ** torch.linspace(0, 3, 32)
    caches = [torch.full((3, 16, 3, 64), 0x11, dtype=torch.uint8, device=device).view(FLOAT8) for _ in range(2)]
    queries = store(
        qkv.to(device),
        (*weights, 1e-6) if normed else None,
        torch.cat((angles.cos(), angles.sin()), dim=-1).to(device),
        torch.tensor([8, 0, 3]).to(device),
        *caches,
        torch.tensor([40, 5, -1]).to(device),
        (scales_of(3) if scales is None else scales).to(device),
    )
    return queries.cpu(), *(cache.view(torch.uint8).cpu() for cache in caches)


@pytest.mark.parametrize("normed", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("spread", [1.0, 1e-3, 300.0])  # subnormals of e4m3, and what is beyond its largest number
def test_keys_and_values_are_stored_as_by_the_reference(
    spread: float, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    qkv = (randn(3, (6 + 2 * 3) * 64, seed=1, device=torch.device("cpu")) * spread).to(dtype)
    actual = stored(qk_norm_rope_store_kv, qkv, device, normed=normed)
    expected = stored(reference.qk_norm_rope_store_kv, qkv, torch.device("cpu"), normed=normed)
    assert_close(actual[0], expected[0])
    # Values are copied, so that nothing before the rounding is computed: equal but for the sign of a zero.
    assert torch.equal(actual[2].view(FLOAT8).float(), expected[2].view(FLOAT8).float())
    # A key is the sum of two products, which may round apart by a bit, and so may e4m3's of it, seldom.
    assert float((actual[1].view(FLOAT8).float() != expected[1].view(FLOAT8).float()).float().mean()) < 0.01
    assert int((expected[2] != 0x11).any(-1).sum()) == 2 * 3


def test_halves_are_stored_as_the_even_of_two(device: torch.device) -> None:
    every = torch.arange(0x7F, dtype=torch.uint8).view(FLOAT8).float()
    halves = (every[1:] + every[:-1]) / 2  # 126
    qkv = torch.ones(3, 12 * 64)
    qkv[0, -126:] = halves
    _, _, values = stored(qk_norm_rope_store_kv, qkv, device, scales=torch.ones(2, 3))
    found = values[2, 8, 1:].flatten()[2:].int()
    assert found.tolist() == [lower + lower % 2 for lower in range(126)]


def test_what_is_not_finite_is_stored_as_nan(device: torch.device) -> None:
    qkv = torch.ones(3, 12 * 64)
    qkv[0, -64:-60] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e37])
    _, _, values = stored(qk_norm_rope_store_kv, qkv, device)
    assert values.view(FLOAT8)[2, 8, 2, :4].float().isnan().tolist() == [True, True, True, False]
    assert values.view(FLOAT8)[2, 8, 2, 3].item() == 448


@pytest.mark.parametrize("split_tokens", [64, 8192])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (7, 1)])
def test_decode_agrees_with_the_reference(
    heads: tuple[int, int], split_tokens: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_every(monkeypatch, split_tokens)
    check(paged_decode_attention, case_of(DECODE, heads, dtype), device)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (7, 1)])
def test_prefill_agrees_with_the_reference(heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(paged_prefill_attention, case_of(CHUNKS, heads, dtype), device)


@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_every_head_dim_agrees_with_the_reference(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    check(paged_decode_attention, case_of([(1, 67), (1, 9)], (4, 2), dtype, head_dim=head_dim), device)
    check(paged_prefill_attention, case_of([(1, 33), (5, 70)], (4, 2), dtype, head_dim=head_dim), device)


def test_shared_prefixes_agree_with_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    lens, groups = [(1, 70), (1, 40), (1, 133), (1, 9)], [(0, 3, 32)]
    check(paged_decode_attention, case_of(lens, (8, 2), dtype, prefix_groups=groups), device)
    chunks = [(5, 70), (3, 40), (7, 133), (2, 9)]
    check(paged_prefill_attention, case_of(chunks, (8, 2), dtype, prefix_groups=groups), device)


def test_windows_agree_with_the_reference(device: torch.device) -> None:
    for operation, lens in ((paged_decode_attention, DECODE), (paged_prefill_attention, CHUNKS)):
        plain = make_paged_cache(lens, num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float32)
        check(operation, in_float8(with_window(plain, 33)), device)


def test_a_token_is_seen_as_rounded_in_its_own_step(device: torch.device) -> None:
    """Storing and decoding gives the bits of both one after the other."""
    case = case_of([(1, 40), (1, 17)], (4, 2), torch.float32)
    assert case.rows.kv_scales is not None
    angles = torch.arange(40)[:, None] * 0.1 ** torch.linspace(0, 3, 32)
    last = case.rows.seq_lens.long() - 1
    slots = case.rows.block_tables.gather(1, last[:, None] // 16)[:, 0].long() * 16 + last % 16
    results = []
    for in_one in (False, True):
        heads = ProjectedHeads(
            randn(2, 8 * 64, seed=5, device=device),
            None,
            torch.cat((angles.cos(), angles.sin()), dim=-1).to(device),
            last.to(device),
            case.k_cache.clone().to(device),
            case.v_cache.clone().to(device),
            slots.to(device),
            case.rows.kv_scales.to(device),
        )
        names = ("block_tables", "cu_seqlens_q", "seq_lens", "kv_scales")
        rows = replace(case.rows, **{name: getattr(case.rows, name).to(device) for name in names})
        if in_one:
            results.append(store_and_decode(heads, rows, 0.125))
        else:
            queries = qk_norm_rope_store_kv(*heads)
            results.append(paged_decode_attention(queries, heads.k_cache, heads.v_cache, rows, 0.125))
    assert torch.equal(*results)


def logits_of_steps(model: DecoderModel, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two sequences: chunks of both, a step of decode alone, which stores and decodes, and one beside a chunk."""
    device, config = model.device, model.config
    kv_cache = KVCacheTensors.allocate(
        KVCacheSpec(config.num_layers, 16, config.num_kv_heads, config.head_dim, dtype), 6, device
    )
    first, second = range(1, 4), range(4, 6)
    steps = (
        [ForwardItem([*range(5, 29)], 0, first, wants_logits=True), ForwardItem([9, 8, 7], 0, second, True)],
        [ForwardItem([7], 24, first, wants_logits=True), ForwardItem([8], 3, second, wants_logits=True)],
        [ForwardItem([9], 25, first, wants_logits=True), ForwardItem([6, 5], 4, second, wants_logits=True)],
    )
    planned = [plan_batch(items, 16) for items in steps]
    batches = [each.on_device(ArrayStaging(device).send(each.arrays)) for each in planned]
    return [model.forward(batch, kv_cache).logits.float().cpu() for batch in batches]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])  # norms of heads; caps and windows; sinks
def test_a_models_logits_are_those_of_the_reference(family: Family, device: torch.device, tmp_path: Path) -> None:
    """Which rounds the same way: that itself moves them by a tenth or more."""
    path = make_checkpoint(tmp_path, family, num_hidden_layers=2)
    models = []
    for ops, place in ((triton, device), (reference, torch.device("cpu"))):
        placement = ModelPlacement(place, torch.float32, cast("Operations", ops), 64, None, has_float8_cache=True)
        with Checkpoint.open(path) as checkpoint:
            model = load_decoder(decoder_config(path), checkpoint, placement)
        scales = torch.tensor([[0.03, 0.02], [0.011, 0.017]], device=place)
        layers = tuple(replace(each, attention=replace(each.attention, kv_scales=scales)) for each in model.layers)
        models.append(replace(model, layers=layers))
    exact = replace(models[1], layers=tuple(without_scales(each) for each in models[1].layers))
    results = [logits_of_steps(model, FLOAT8) for model in models], logits_of_steps(exact, torch.float32)
    for found, expected, unrounded in zip(*results[0], results[1], strict=True):
        assert (found - expected).abs().max() < 1e-3 * expected.std()
        assert (unrounded - expected).abs().max() > 0.03 * expected.std()


def without_scales(layer: DecoderLayer) -> DecoderLayer:
    return replace(layer, attention=replace(layer.attention, kv_scales=None))


def test_an_engine_with_a_float8_cache_gives_the_references_tokens(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, a preemption, prefix hits and shared prefixes over blocks of e4m3."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    options = {
        "engine.kv_cache.dtype": "fp8",
        "engine.native_kernels": "off",  # they go before what is put in the place of a CPU's operations
        "engine.max_num_seqs": "3",
        "engine.max_num_batched_tokens": "16",
        "engine.kv_cache.num_blocks": "9",
    }
    prefix = range(5, 25)
    requests = [greedy_request(name, [*prefix, *rest], 6) for name, rest in (("a", [40, 41, 42]), ("b", [50]))]
    requests += [greedy_request("c", [7], 5), greedy_request("d", [*prefix, 40], 4)]
    found = []
    for ops, place in ((triton, device.type), (reference, "cpu")):
        with monkeypatch.context() as patch:
            patch.setattr("engine.loading.derived_settings.check_float8_cache", lambda _: None)
            patch.setattr("engine.models.placement.operations", lambda _, ops=ops: ops)
            engine = load_engine(tmp_path, {**options, "engine.device": place})
        assert engine.parts.executor.kv_cache.keys[0].dtype is FLOAT8
        found.append({name: tokens_of(output) for name, output in run_all(engine, requests).items()})
        assert engine.stats().cached_tokens > 0
    assert found[0] == found[1]


def test_a_layers_scales_leave_its_window_its_cap_and_its_sinks() -> None:
    rows, sinks, scales = case_of(DECODE, (8, 2), torch.float32).rows, torch.zeros(8), scales_of(2)
    scaled = replace(rows, kv_scales=None).windowed(33).scored(2.0, sinks).scaled(scales)
    assert (scaled.window, scaled.soft_cap) == (33, 2.0)
    assert scaled.sinks is sinks
    assert scaled.kv_scales is scales
    assert rows.scaled(None) is rows


def test_scales_and_float8_go_together(device: torch.device) -> None:
    case = case_of([(1, 9)], (2, 2), torch.float32)
    case = replace(case, rows=replace(case.rows, seq_lens=case.rows.seq_lens.to(device)))
    plain = torch.zeros(case.k_cache.shape)
    for operation in (paged_decode_attention, paged_prefill_attention):
        with pytest.raises(ValueError, match=r"a cache in torch\.float8_e4m3fn without scales"):
            operation(case.q, case.k_cache, case.v_cache, replace(case.rows, kv_scales=None), 0.125)
        with pytest.raises(ValueError, match=r"a cache in torch\.float32 with scales; accepted: float8_e4m3fn with"):
            operation(case.q, plain, plain, case.rows, 0.125)


@pytest.mark.parametrize("operations", [cpu, deterministic, *map(native_operations, native_variants()[:1])])
def test_the_kernels_of_a_cpu_refuse_float8(operations: Any) -> None:
    case = case_of([(1, 9)], (2, 2), torch.float32)
    caches = (case.k_cache, case.v_cache)
    message = "caches in torch.float8_e4m3fn and torch.float8_e4m3fn with scales; accepted here: caches in the model"
    for operation in (operations.paged_decode_attention, operations.paged_prefill_attention):
        with pytest.raises(ValueError, match=message):
            operation(case.q, *caches, case.rows, 0.125)
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        operations.qk_norm_rope_store_kv(
            torch.zeros(1, 6 * 64), None, torch.zeros(9, 64), ids, *caches, ids, case.rows.kv_scales
        )
