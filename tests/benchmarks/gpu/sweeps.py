"""Tries launches of kernels and PyTorch's libraries on the GPU that is there, and writes what was fastest.

`tuned.json`, beside the other figures, is what `kernels.triton.launch.tuned` reads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest import mock

import torch

import kernels.triton
from engine.loading.derived_settings import usable_cores
from engine.models.placement import require_float32_sums
from kernels.operands import AttentionRows, ProjectedHeads
from kernels.triton import launch
from kernels.triton.compilation import compile_ahead
from kernels.triton.grouped_gemm import grouped_gemm_launch
from tests.benchmarks.gpu.workload import Deadline
from tests.benchmarks.kernel_inputs import BLOCK_SIZE, EPS, last_slots
from tests.benchmarks.machine import GpuTimer

Figures = Iterator[dict[str, Any]]

NO_GPU = "not measured"
MOE_TOKENS = (64, 128, 256)
# Left to the rules: below 64 the best of eight tiles was within 9 % of them (1 token), 1 and 2 % (8, 32) on an H200.
RULED_TOKENS = (1, 8, 32, 512, 1024, 1536, 2048)
# Lines as of the launch table of grouped products: rows, columns, depth, rows side by side, warps, stages.
MOE_TILES = (
    *((16, 64, 128, 1, 4, 3), (16, 64, 128, 1, 4, 4), (16, 64, 256, 1, 4, 2), (16, 128, 128, 1, 4, 2)),
    *((16, 128, 128, 1, 4, 3), (16, 128, 128, 1, 8, 3), (16, 256, 128, 1, 8, 2), (16, 128, 64, 1, 4, 4)),
    *((32, 128, 128, 1, 4, 2), (32, 128, 128, 1, 4, 3), (32, 256, 128, 16, 8, 2), (64, 128, 64, 1, 4, 3)),
)
DECODE_LAUNCHES = tuple(
    {"tile": tile, "num_warps": warps, "num_stages": stages, "max_registers": 224}
    for tile, warps, stages in ((16, 1, 5), (16, 1, 7), (16, 2, 5), (32, 2, 5), (32, 4, 5), (128, 4, 3))
)
# The fewest keys of a split, the same in launches that are full without, and the programs that a multiprocessor gets.
SPLITS = ((128, 8192, 4), (128, 8192, 2), (128, 8192, 8), (128, 1024, 4))
# Heads, KV heads, dims, lengths: batches of 256 and 64 of Qwen3-0.6B, 8B and 30B-A3B.
DECODE_SHAPES: Mapping[str, tuple[int, int, int, Sequence[int]]] = {
    "16/8 heads, 256 x 800": (16, 8, 128, [800] * 256),
    "16/8 heads, 128 to 2005": (16, 8, 128, [100 + 15 * (53 * row % 128) for row in range(128)]),
    "32/8 heads, 64 x 1024": (32, 8, 128, [1024] * 64),
    "32/4 heads, 64 x 1024": (32, 4, 128, [1024] * 64),
    "32/8 heads, 8 x 1024": (32, 8, 128, [1024] * 8),
}
# Of Hopper, whose rule is 128 rows, 8 warps and 5 stages; on other GPUs 64 keys a tile spill, or do not fit.
PREFILL_LAUNCHES = tuple(
    {"block_m": rows, "tile": 64, "num_warps": warps, "num_stages": stages}
    for rows, warps, stages in ((128, 8, 3), (64, 4, 3), (64, 4, 5))
)
# Heads, KV heads, dims, lengths of prompts: nano-vllm's workload, a long one, a step full of middling ones.
PREFILL_SHAPES: Mapping[str, tuple[int, int, int, Sequence[int]]] = {
    "16/8 heads, 15 of 100 to 992": (16, 8, 128, [100 + 892 * (53 * row % 15) // 14 for row in range(15)]),
    "32/8 heads, 8 x 1024": (32, 8, 128, [1024] * 8),
    "32/4 heads, 1 x 8192": (32, 4, 128, [8192]),
}
LIBRARIES = ("cublas", "cublaslt")
PRODUCTS = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))  # [N, K] of Qwen3-8B


@dataclass
class Place:
    """Where a stage runs, which part of it, and until when."""

    device: torch.device
    out: Path
    is_tiny: bool
    part: int  # of `num_parts`, each a process
    num_parts: int
    deadline: Deadline

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def gpu(self) -> str:
        """The GPU's name."""
        return torch.cuda.get_device_name(self.device) if self.has_gpu else "none"

    def ran_on(self, without_gpu: str) -> str:
        """What a figure ran on."""
        return self.gpu if self.has_gpu else without_gpu

    @cached_property
    def _timer(self) -> GpuTimer:
        return GpuTimer(self.device)

    def median_us(self, run: Callable[[], object], restore: Callable[[], None] | None = None) -> float:
        """Time of a run on the GPU, `restore` left out; without one the time of a single run, which means nothing."""
        if self.has_gpu:
            return self._timer.median_us(run, restore)
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6


def _choose(
    place: Place, tried: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Callable[[], object]]
) -> dict[str, Any]:
    """Time the runs, by name, with each choice of launches, and with the rules that hold where nothing was tuned. Best
    is what is fastest over all of them, each in shares of the rules' time, of those for which there was time.
    """
    times_us: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    choices: dict[str, Mapping[str, Any]] = {"rules": {}, **tried}

    def launch_each() -> None:
        for chosen in choices.values():
            with mock.patch.object(launch, "read_tuned", return_value=chosen):
                for run in runs.values():
                    run()

    compile_ahead(launch_each, usable_cores())
    for label, chosen in choices.items():
        if label != "rules" and place.deadline.left_s <= 0:
            errors[label] = "not tried: the time is up"
            continue
        with mock.patch.object(launch, "read_tuned", return_value=chosen):
            try:
                times_us[label] = [round(place.median_us(run), 1) for run in runs.values()]
            except Exception as raised:  # the seam: a tile may not fit, but the engine's own must
                if label == "rules":
                    raise
                errors[label] = f"{type(raised).__name__}: {raised}".splitlines()[0][:200]
    ratios = {
        label: geometric_mean(us / rules_us for us, rules_us in zip(found, times_us["rules"], strict=True))
        for label, found in times_us.items()
    }
    best = min(ratios, key=lambda label: ratios[label])
    return {
        "shapes": list(runs),
        "ran_on": place.ran_on("Triton's interpreter"),
        "times_us": times_us,
        "errors": errors,
        "best": best,
        "choice": tried.get(best),
        "headline": f"{best}, {100 * (1 - ratios[best]):.0f} % faster than the rules" if place.has_gpu else NO_GPU,
    }


def _keep(place: Place, name: str, choice: Any) -> None:
    """Add a choice to tuned.json; without a GPU under the name of none, which no launch reads."""
    path = place.out / "tuned.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known.setdefault(place.gpu, {})[name] = choice
    path.write_text(json.dumps(known, indent=1) + "\n")


def moe_tiles(place: Place) -> Figures:
    """Tiles of the experts' products, by the number of tokens."""
    num_experts, top_k, hidden, width = (4, 2, 32, 16) if place.is_tiny else (128, 8, 2048, 768)
    dtype = torch.bfloat16 if place.has_gpu else torch.float16
    lines: dict[str, Any] = {}  # beside those tried, of more tokens by the rules: the nearest line is taken
    gate_up, down = (
        kernels.triton.pack(torch.randn(num_experts, *shape, device=place.device).mul(0.02).to(dtype))
        for shape in ((2 * width, hidden), (hidden, width))
    )
    for tokens in (2,) if place.is_tiny else MOE_TOKENS:
        x = torch.randn(tokens, hidden, device=place.device).to(dtype)
        scores = torch.rand(tokens, num_experts, device=place.device).to(dtype)
        routed = kernels.triton.route_topk(scores, top_k, renormalise=True)

        def run(x: torch.Tensor = x, ids: torch.Tensor = routed.expert_ids) -> torch.Tensor:
            layout = kernels.triton.sort_tokens_by_expert(ids, num_experts)  # into the tiles that are tried
            inner = kernels.triton.grouped_gemm(x, gate_up, layout, gather=True, gated=True)
            return kernels.triton.grouped_gemm(inner, down, layout, gather=False)

        tiles = [tile for tile in MOE_TILES if tile[0] <= 16 or tokens >= 64][: 2 if place.is_tiny else None]
        tried = {str(tile): {"grouped_gemm": {f"{num_experts}, {top_k}": {str(tokens): tile}}} for tile in tiles}
        figure = _choose(place, tried, {f"{tokens} tokens": run})
        yield {"figure": "grouped_gemm", **figure}
        if figure["choice"]:
            lines |= figure["choice"]["grouped_gemm"][f"{num_experts}, {top_k}"]
            ruled = {str(count): _ruled_tile(count, num_experts, top_k) for count in (*MOE_TOKENS, *RULED_TOKENS)}
            _keep(place, "grouped_gemm", {f"{num_experts}, {top_k}": ruled | lines})


def _ruled_tile(tokens: int, num_experts: int, top_k: int) -> list[int]:
    capability = launch.compute_capability()
    found = grouped_gemm_launch(tokens * top_k, top_k, num_experts, itemsize=2, capability=capability, gather=True)
    tile = [found.block_m, found.block_n, found.block_k, found.group_m]
    return [*tile, found.num_warps, found.num_stages]


def attention(place: Place) -> Figures:
    """Launches of prefill, then those of decode with splits: smaller programs want more of them."""
    shapes = {"2 prompts": (2, 1, 16, [5, 70])} if place.is_tiny else PREFILL_SHAPES
    runs = {name: _prefilling(place, *shape) for name, shape in shapes.items()}
    launches = PREFILL_LAUNCHES[:1] if place.is_tiny else PREFILL_LAUNCHES
    tried: dict[str, dict[str, Any]] = {
        str([*options.values()]): {"prefill_attention": {"128": options}} for options in launches
    }
    yield from _kept(place, "prefill_attention", tried, runs)
    shapes = {"2 rows": (2, 1, 16, [5, 70])} if place.is_tiny else DECODE_SHAPES
    runs = {name: _decoding(place, *shape) for name, shape in shapes.items()}
    chosen = [(options, splits) for options in DECODE_LAUNCHES for splits in SPLITS]
    tried = {
        f"{[*options.values(), *splits]}": {"decode_attention": {"128": options}, "decode_splits": splits}
        for options, splits in (chosen[:2] if place.is_tiny else chosen)
    }
    yield from _kept(place, "decode_attention", tried, runs)


def _kept(
    place: Place, figure: str, tried: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Callable[[], object]]
) -> Figures:
    found = _choose(place, tried, runs)
    yield {"figure": figure, **found}
    for name, choice in (found["choice"] or {}).items():
        _keep(place, name, choice)


def _prefilling(place: Place, heads: int, kv_heads: int, dim: int, lens: Sequence[int]) -> Callable[[], object]:
    """A step's attention of whole prompts of so many tokens."""
    rows, caches = _cached(place, kv_heads, dim, lens, lens)
    queries = torch.randn(sum(lens), heads, dim, device=place.device, dtype=caches.dtype)
    return partial(kernels.triton.paged_prefill_attention, queries, caches[0], caches[1], rows, dim**-0.5)


def _decoding(place: Place, heads: int, kv_heads: int, dim: int, lens: Sequence[int]) -> Callable[[], object]:
    """A decode step's attention of rows with so many keys, as the engine launches it."""
    rows, caches = _cached(place, kv_heads, dim, lens, (1,) * len(lens))
    device, dtype = place.device, caches.dtype
    positions, slots = last_slots(rows, BLOCK_SIZE)
    qkv = torch.randn(len(lens), (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    norm, rotations = torch.ones(dim, device=device, dtype=dtype), torch.randn(max(lens), dim, device=device)
    projected = ProjectedHeads(qkv, (norm, norm, EPS), rotations, positions, caches[0], caches[1], slots)
    return partial(kernels.triton.store_and_decode, projected, rows, dim**-0.5)


def _cached(
    place: Place, kv_heads: int, dim: int, lens: Sequence[int], query_lens: Sequence[int]
) -> tuple[AttentionRows, torch.Tensor]:
    """Rows with so many keys, of which the last are the queries' own, in blocks anywhere, and the caches [2, ...]."""
    num_blocks = [-(-length // BLOCK_SIZE) for length in lens]
    order = iter(torch.randperm(sum(num_blocks)).tolist())
    tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int32)
    for row, count in enumerate(num_blocks):
        tables[row, :count] = torch.tensor([next(order) for _ in range(count)])
    device, dtype = place.device, torch.bfloat16 if place.has_gpu else torch.float16
    rows = AttentionRows(
        tables.to(device),
        torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        tuple(query_lens),
        (max(lens),) * len(lens),
    )
    return rows, torch.randn(2, sum(num_blocks), BLOCK_SIZE, kv_heads, dim, device=device, dtype=dtype)


def blas(place: Place) -> Figures:
    """Which library multiplies Qwen3-8B's matrices faster."""
    if not place.has_gpu:
        yield {"figure": "blas_library", "ran_on": "no GPU", "headline": NO_GPU}
        return
    require_float32_sums()
    total_us = dict.fromkeys(LIBRARIES, 0.0)
    for columns, depth in PRODUCTS:
        weight = torch.randn(columns, depth, device=place.device).bfloat16()
        for tokens in (1, 64, 256):
            x = torch.randn(tokens, depth, device=place.device).bfloat16()
            for library in LIBRARIES:
                torch.backends.cuda.preferred_blas_library(library)
                us = place.median_us(partial(torch.nn.functional.linear, x, weight))
                total_us[library] += us
                yield {"figure": "product", "shape": [tokens, columns, depth], "library": library, "us": round(us, 1)}
    best = min(total_us, key=lambda library: total_us[library])
    _keep(place, "blas_library", best)
    yield {"figure": "blas_library", "total_us": total_us, "best": best, "headline": best}
