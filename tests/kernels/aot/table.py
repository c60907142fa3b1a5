"""Launches every operation at the shapes of the supported models, and tables what each kernel takes of a GPU.

`python -m tests.kernels.aot.table --write` writes the Markdown table into the document that keeps it for the triton
that is installed; without --write it is printed. It needs no GPU: the kernels are compiled for sm_80 and sm_90, those
of quantised weights and of a KV cache in float8 for sm_89 too (the latter not for sm_80), or taken from triton's cache
where their code has not changed. Launched are attention and elementwise operations at the shapes of four models and at
the head sizes none of them has, with a window at four of these, experts at those of Qwen3-30B-A3B and of other expert
layers, products with quantised weights at 4096 x 4096, sampling at two sizes of vocabulary.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton

from kernels.operands import ExpertOutputs, PackedWeight, RoutedExperts, Truncation
from kernels.quantised import QuantisedWeight, WeightScheme
from kernels.triton import quantised
from kernels.triton.combine_experts import add_experts_rms_norm, combine_experts
from kernels.triton.dense import MANY_ROWS, fused_add_rms_norm, rms_norm, silu_and_mul
from kernels.triton.experts import route_and_sort, route_topk, sort_tokens_by_expert
from kernels.triton.grouped_gemm import grouped_gemm
from kernels.triton.gumbel import choose_tokens
from kernels.triton.moe_small_batch import moe_small_batch
from kernels.triton.quantised import pack
from kernels.triton.rope_kv_store import qk_norm_rope_store_kv
from kernels.triton.sampling import apply_penalties
from tests.kernels.aot.attention_launches import (
    launch_attention,
    launch_attention_once,
    launch_float8_cache,
    launch_windows,
)
from tests.support.compiled_kernels import SHARED_MEMORY_LIMIT_BYTES, CompiledKernel, compiled_kernels

_KERNELS = Path(__file__).resolve().parents[3] / "kernels"
# triton -> the document with its table: the one that the tests install, and that of PyTorch 2.11.
DOCUMENTS = {"3.7.1": _KERNELS / "DESIGN.md", "3.6.0": _KERNELS / "TRITON_3_6.md"}
TABLE = re.compile(r"^\| kernel \|.*(?:\n\|.*)*", re.MULTILINE)

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
ELEMENTWISE_ROW_COUNTS = (1, MANY_ROWS - 1, MANY_ROWS)  # one on each side of the only branch

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8  # Qwen3-30B-A3B
# One number of tokens for each line of the H200 table; together they also reach each line of the derived rule.
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 4096)
# (experts, top_k, tokens) that take the derived rule on Hopper too: 16 rows narrow and wide, 32, 64, 128, grouped 128.
DERIVED = ((64, 6, 4), (64, 6, 80), (64, 6, 150), (64, 6, 300), (64, 6, 1000), (64, 6, 4000))

VOCAB_SIZES = (151_936, 128_256)  # Qwen3 of every size, Llama 3
SAMPLING_ROW_COUNTS = (1, 64)

HEADINGS = (
    *("kernel", "configuration", "warps", "stages", "sm", "registers", "spilled bytes", "shared bytes"),
    *("16-byte async copies", "wgmma"),
)
LAUNCH_CONSTANTS = ("BLOCK", "TILE", "CHUNK", "SWAP")  # how the names begin of what a launch function decides


@dataclass(frozen=True)
class _Model:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    qk_norm: bool
    head_dim: int = 128


_MODELS = {
    "Qwen3-0.6B": _Model(1024, 3072, 16, 8, True),
    "Qwen3-8B": _Model(4096, 12288, 32, 8, True),
    "Qwen3-30B-A3B": _Model(2048, 768, 32, 4, True),
    "Llama-3-8B": _Model(4096, 14336, 32, 8, False),
}
# Head sizes that none of them has, and hidden sizes that are no powers of two.
_OTHER_MODELS = [_Model(1000, 1000, 4, 4, True, d) for d in (64, 80)] + [
    _Model(5120, 17408, 7, 1, True, d) for d in (96, 256)
]


def launch_elementwise() -> None:
    """Call the operations with tensors that nobody reads or writes."""
    for model in (*_MODELS.values(), *_OTHER_MODELS):
        weight = torch.empty(model.hidden_size, dtype=DTYPE)
        for num_rows in ELEMENTWISE_ROW_COUNTS:
            x = torch.empty(num_rows, model.hidden_size, dtype=DTYPE)
            rms_norm(x, weight, 1e-6)
            fused_add_rms_norm(x, torch.empty_like(x), weight, 1e-6)
            silu_and_mul(torch.empty(num_rows, 2 * model.intermediate_size, dtype=DTYPE))
        for num_tokens in (1, 2048):
            _store(model, num_tokens)


def _store(model: _Model, num_tokens: int) -> None:
    cache = torch.empty(8, BLOCK_SIZE, model.num_kv_heads, model.head_dim, dtype=DTYPE)
    norm = torch.empty(model.head_dim, dtype=DTYPE)
    qk_norm_rope_store_kv(
        torch.empty(num_tokens, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim, dtype=DTYPE),
        (norm, norm, 1e-6) if model.qk_norm else None,
        torch.empty(40960, model.head_dim),
        torch.empty(num_tokens, dtype=torch.int64),
        cache,
        torch.empty_like(cache),
        torch.empty(num_tokens, dtype=torch.int64),
    )


def _run_gemms(num_tokens: int, num_experts: int, top_k: int) -> None:
    layout = sort_tokens_by_expert(torch.empty(num_tokens, top_k, dtype=torch.int64), num_experts)
    gate_up = torch.empty(num_experts, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16, device="meta")
    down = torch.empty(num_experts, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, device="meta")
    grouped_gemm(torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16), pack(gate_up), layout, gather=True, gated=True)
    hidden = torch.empty(num_tokens * top_k, INTERMEDIATE, dtype=torch.bfloat16)
    grouped_gemm(hidden, pack(down), layout, gather=False)


def _run_others(num_tokens: int) -> None:
    for renormalise in (False, True):
        logits = torch.empty(num_tokens, EXPERTS, dtype=torch.bfloat16)
        weights, layout = route_and_sort(logits, TOP_K, renormalise=renormalise)
        route_topk(logits, TOP_K, renormalise=renormalise)
    rows = torch.empty(num_tokens * TOP_K, HIDDEN, dtype=torch.bfloat16)
    combine_experts(rows, layout, weights)
    residual, norm = torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16), torch.empty(HIDDEN, dtype=torch.bfloat16)
    add_experts_rms_norm(ExpertOutputs(rows, layout, weights), residual, norm, 1e-6)


def _run_short_cut(num_tokens: int) -> None:
    x = torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16)
    gate_up = torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16, device="meta")
    down = torch.empty(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, device="meta")
    expert_ids = torch.empty(num_tokens, TOP_K, dtype=torch.int64)
    moe_small_batch(x, pack(gate_up), pack(down), RoutedExperts(torch.empty(num_tokens, TOP_K), expert_ids))


def launch_experts() -> None:
    """Call every operation in every configuration its launch can take; meant to run under `compiling_for`."""
    for num_tokens in TOKENS:
        _run_gemms(num_tokens, EXPERTS, TOP_K)
        _run_others(num_tokens)
    for num_experts, top_k, num_tokens in DERIVED:
        _run_gemms(num_tokens, num_experts, top_k)
    _run_short_cut(1)


def launch_sampling() -> None:
    """Launch every sampling kernel in every configuration that its launch function returns for these shapes."""
    for vocab_size in VOCAB_SIZES:
        for num_rows in SAMPLING_ROW_COUNTS:
            _sample(num_rows, vocab_size)


def _sample(num_rows: int, vocab_size: int) -> None:
    logits = torch.empty(num_rows, vocab_size)
    ids = torch.empty(num_rows, dtype=torch.int64)
    number = torch.empty(num_rows)
    pairs = torch.empty(1000, dtype=torch.int64)
    is_known = torch.empty(vocab_size, dtype=torch.bool)
    choose_tokens(logits.to(DTYPE), is_known, number, ids, ids)
    apply_penalties(logits, pairs, pairs, pairs.int(), number, number, number)
    for values in (logits.to(DTYPE), logits):
        choose_tokens(values, is_known, number, ids, ids, Truncation(ids, number, number))


INT8 = WeightScheme(8, is_float=False, group_size=None, activations="int8_token")
_QUANTISED_TOKENS = (16, 32, 64, 128)  # one for each height of tile
# Scheme, whether inputs are reordered, tokens. The first and last reach every height of tile.
_QUANTISED = (
    (WeightScheme(4, is_float=False, group_size=128), False, _QUANTISED_TOKENS),
    (WeightScheme(4, is_float=False, group_size=64, symmetric=False), False, (16, 128)),
    (WeightScheme(4, is_float=False, group_size=128), True, (16, 128)),
    (WeightScheme(4, is_float=False, group_size=32, symmetric=False), True, (16, 128)),
    (WeightScheme(4, is_float=False, group_size=None), False, (16, 128)),
    (WeightScheme(8, is_float=False, group_size=128, symmetric=False), True, (16, 128)),
    (WeightScheme(8, is_float=False, group_size=None), False, (16, 128)),
    (INT8, False, (16, 128)),
    (WeightScheme(8, is_float=True, group_size=None, activations="float8_token"), False, (16, 128)),
    (WeightScheme(8, True, group_size=128, block_rows=128, activations="float8_group"), False, _QUANTISED_TOKENS),
)


def quantised_weight(scheme: WeightScheme, *shape: int, is_reordered: bool = False) -> PackedWeight:
    """A weight [.., N, K] of zeros in this scheme, packed."""
    dtype = torch.float8_e4m3fn if scheme.is_float else torch.int8 if scheme.bits == 8 else torch.uint8
    *lead, rows, width = shape
    values = torch.zeros(*lead, rows, width * scheme.bits // 8, dtype=torch.uint8).view(dtype)
    grid = (*lead, -(-rows // (scheme.block_rows or 1)), -(-width // (scheme.group_size or width)))
    zeros = None if scheme.symmetric else torch.zeros(grid, dtype=torch.uint8 if scheme.bits == 4 else torch.int8)
    order = torch.zeros(*lead, width, dtype=torch.int64) if is_reordered else None
    return pack(QuantisedWeight(scheme, values, torch.zeros(grid, dtype=torch.bfloat16), zeros, order))


def launch_quantised() -> None:
    """A linear of each scheme; experts of two of them, and of one whose inputs are reordered: sorted, of few rows and
    many, and pair by pair.
    """
    for scheme, is_reordered, token_counts in _QUANTISED:
        weight = quantised_weight(scheme, 4096, 4096, is_reordered=is_reordered)
        for num_tokens in token_counts:
            quantised.linear(torch.empty(num_tokens, 4096, dtype=DTYPE), weight)
    for num_tokens in _QUANTISED_TOKENS:  # so wide that no depth is split
        quantised.linear(torch.empty(num_tokens, 4096, dtype=DTYPE), quantised_weight(_QUANTISED[0][0], 24_576, 4096))
    for scheme, is_reordered in ((_QUANTISED[0][0], False), (_QUANTISED[0][0], True), (_QUANTISED[-1][0], False)):
        gate_up = quantised_weight(scheme, 8, 2 * INTERMEDIATE, HIDDEN, is_reordered=is_reordered)
        down = quantised_weight(scheme, 8, HIDDEN, INTERMEDIATE, is_reordered=is_reordered)
        for num_tokens in (4, 512):
            layout = sort_tokens_by_expert(torch.empty(num_tokens, 2, dtype=torch.int64), 8)
            x = torch.empty(num_tokens, HIDDEN, dtype=DTYPE)
            hidden = quantised.grouped_gemm(x, gate_up, layout, gather=True, gated=True)
            quantised.grouped_gemm(hidden, down, layout, gather=False)
        routed = RoutedExperts(torch.empty(1, TOP_K), torch.empty(1, TOP_K, dtype=torch.int64))
        quantised.moe_small_batch(torch.empty(1, HIDDEN, dtype=DTYPE), gate_up, down, routed)


# Two to four minutes of a core each where nothing is in Triton's cache, by `make test-aot`.
SM_80, SM_90 = (pytest.param(capability, marks=pytest.mark.aot) for capability in (80, 90))
# By `make slow`: float8 is compiled for sm_90 too.
SM_89 = pytest.param(89, marks=(pytest.mark.aot, pytest.mark.slow))
LAUNCHES = (launch_attention, launch_windows, launch_elementwise, launch_experts, launch_sampling, launch_quantised)
# Where float8 begins, what has it alone: an L4 and an RTX 4090 otherwise run what is compiled for sm_80.
LAUNCHES_OF = {80: LAUNCHES, 89: (launch_quantised, launch_float8_cache), 90: (*LAUNCHES, launch_float8_cache)}


def launches_on(capability: int) -> Sequence[Callable[[], None]]:
    """What is launched where kernels are compiled for one GPU alone."""
    return LAUNCHES if capability < 89 else LAUNCHES_OF[90]


def launch_each() -> None:
    """Each kernel once, or a few times."""
    launch_attention_once()
    launch_small()
    model = _MODELS["Qwen3-8B"]
    _store(model, 1)
    silu_and_mul(torch.empty(1, 2 * model.intermediate_size, dtype=DTYPE))
    for num_tokens in (1, TOKENS[-1]):
        _run_gemms(num_tokens, EXPERTS, TOP_K)
        _run_others(num_tokens)
    _run_short_cut(1)
    for scheme in (_QUANTISED[0][0], INT8):
        quantised.linear(torch.empty(1, 4096, dtype=DTYPE), quantised_weight(scheme, 4096, 4096))


def launch_small() -> None:
    """A few launches that compile in seconds."""
    _sample(1, VOCAB_SIZES[0])
    rms_norm(torch.empty(1, 1024, dtype=DTYPE), torch.empty(1024, dtype=DTYPE), 1e-6)


def compile_all(capability: int) -> list[CompiledKernel]:
    """Every kernel that any case launches, in the order of the launches."""
    return compiled_kernels(capability, LAUNCHES_OF[capability])


def table_rows(kernels: Iterable[CompiledKernel]) -> list[tuple[str, ...]]:
    """One row a kernel, launch (blocks, warps, stages) and architecture.

    Kernels that differ in what the shapes decide (head size, gathered or not, dtype, divisibility) share a row, which
    names those constants and has the range of what they take. Those with a window, and those of a KV cache in float8,
    have rows of their own.
    """
    groups: dict[tuple[str, ...], list[CompiledKernel]] = defaultdict(list)
    for kernel in kernels:
        blocks = _join(f"{name}={value}" for name, value in kernel.constants.items() if _has_own_row(name, value))
        num_stages = kernel.constants.get("NUM_STAGES", kernel.num_stages)
        launch = (kernel.num_warps, num_stages, kernel.capability)
        groups[kernel.name, blocks, *(str(value) for value in launch)].append(kernel)
    return [
        (key[0], _join([key[1], _shape_constants(group)]), *key[2:], *_resources(group))
        for key, group in sorted(groups.items(), key=lambda item: item[0])
    ]


def _has_own_row(name: str, value: object) -> bool:
    """Whether kernels with this constant have a row of their own: what a launch function decides, a window, float8."""
    return name.startswith(LAUNCH_CONSTANTS) or (name in ("WINDOW", "KV_CACHE") and value != 0)


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    """The rows under their headings."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shape_constants(group: list[CompiledKernel]) -> str:
    """The constants in which the kernels of a row differ, with all their values."""
    values: dict[str, dict[str, None]] = defaultdict(dict)  # ordered sets
    for kernel in group:
        for name, value in kernel.constants.items():
            values[name][str(value)] = None
    return _join(f"{name}={'/'.join(found)}" for name, found in values.items() if len(found) > 1)


def _resources(group: list[CompiledKernel]) -> tuple[str, ...]:
    wgmma = {kernel.uses_wgmma for kernel in group}
    return (
        _range(kernel.registers for kernel in group),
        _range(kernel.spill_bytes for kernel in group),
        _range(kernel.shared_bytes for kernel in group),
        _range(kernel.num_async_copies for kernel in group),
        "some" if len(wgmma) > 1 else "yes" if wgmma == {True} else "no",
    )


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def _join(words: Iterable[str]) -> str:
    return " ".join(word for word in words if word)


def main() -> None:
    """Print the table of both architectures, or write it into its document."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.aot.table")
    parser.add_argument("--write", action="store_true", help="write the table into the document that keeps it")
    writes = parser.parse_args().write
    if writes and triton.__version__ not in DOCUMENTS:
        parser.error(f"--write: no document keeps the table of triton {triton.__version__}; accepted: {[*DOCUMENTS]}")
    table = markdown(table_rows(k for capability in SHARED_MEMORY_LIMIT_BYTES for k in compile_all(capability)))
    if not writes:
        print(table)
        return
    document = DOCUMENTS[triton.__version__]
    document.write_text(TABLE.sub(lambda _: table, document.read_text(), count=1))


if __name__ == "__main__":
    main()
