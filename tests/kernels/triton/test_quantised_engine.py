"""The engine on the Triton kernels with quantised checkpoints: the logits and tokens of the reference's operations."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kernels.triton
from engine.engine import Engine
from engine.model_interface import LogitsResult
from kernels import reference
from kernels.triton import quantised
from kernels.triton.launch import compute_capability
from kernels.triton.quantised import FLOAT8_CAPABILITY
from kernels.triton.round_activations import round_activations
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.quantised_checkpoint import METHODS, quantise_checkpoint
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.tiny_families import Family

PREFIX = list(range(5, 21))  # a block, so that later requests hit it
PROMPTS = {"long": [*PREFIX, 40, 41, 42], "hit": [*PREFIX, 50], "short": [7]}
# Chunks and prefix hits in a few steps; experts are sorted in some and taken pair by pair in others.
LIMITS = {
    "engine.dtype": "float32",
    "engine.max_num_seqs": "3",
    "engine.max_num_batched_tokens": "16",
    "engine.kv_cache.num_blocks": "12",
    "engine.moe.bucketed_min_tokens": "6",
}
# Of the mean error, in standard deviations of the logits. Sums in another order; a value between two integers, which
# may go to either; and e4m3, which rounds a value by 1/16 at most and 1/40 on average, where the reference rounds none:
# a token passes four products of one layer.
TOLERANCES = {"none": 1e-5, "int8_token": 0.02, "float8_token": 0.1}


def quantised_file(method: str, family: Family, path: Path) -> Path:
    plain = make_checkpoint(path / "plain", family, num_hidden_layers=1)
    return quantise_checkpoint(plain, path, METHODS[method])[0]


def engine_on(ops: ModuleType, path: Path, device: torch.device, patch: pytest.MonkeyPatch) -> Engine:
    """Without a GPU every engine's tensors are a CPU's, whatever the operations."""
    if ops is kernels.triton and device.type == "cuda":
        return load_engine(path, {**LIMITS, "engine.device": "cuda"})
    patch.setattr("engine.models.placement.operations", lambda _: ops)
    return load_engine(path, {**LIMITS, "engine.native_kernels": "off"})


def logits_of(engine: Engine) -> torch.Tensor:
    """[3, V]: of a token alone, of many, and of one that is decoded after them."""
    interface = engine.model_interface
    results = [interface.prefill("alone", [7]), interface.prefill("many", PREFIX[:9])]
    results.append(interface.decode("many", 60, 9))
    logits = []
    for result in results:
        assert isinstance(result, LogitsResult)
        logits.append(result.logits.float().cpu())
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("method", "family", "activations"),
    [
        ("gptq_order", "qwen3_moe", "none"),
        ("gptq_8bit", "llama", "none"),
        ("awq", "llama", "none"),
        ("w4a16_head", "qwen3_moe", "none"),
        ("fp8_blocks", "qwen3_moe", "none"),  # blocks of 16 inputs, less than what is multiplied in 8 bits
        ("w8a8", "llama", "int8_token"),
        ("fp8_dynamic", "qwen3_moe", "float8_token"),
    ],
)
def test_logits_are_the_references(
    method: str, family: Family, activations: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = set()

    def noting(x: torch.Tensor, dtype: torch.dtype, **options: Any) -> Any:
        dtypes.add(dtype)
        return round_activations(x, dtype, **options)

    monkeypatch.setattr(quantised, "round_activations", noting)
    path = quantised_file(method, family, tmp_path)
    expected = logits_of(engine_on(reference, path, device, monkeypatch))
    assert not dtypes
    found = logits_of(engine_on(kernels.triton, path, device, monkeypatch))
    error = float((found - expected).abs().mean() / expected.std())
    assert error <= TOLERANCES[activations]
    rounded = {"none": set(), "int8_token": {torch.int8}, "float8_token": {torch.float8_e4m3fn}}[activations]
    if device.type == "cuda" and compute_capability() < FLOAT8_CAPABILITY:
        rounded -= {torch.float8_e4m3fn}
    assert dtypes == rounded


def test_tokens_of_chunks_and_prefix_hits_are_the_references(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quantised_file("w4a16_zeros", "qwen3_moe", tmp_path)
    found = []
    for ops in (reference, kernels.triton):
        engine = engine_on(ops, path, device, monkeypatch)
        outputs = run_all(engine, [greedy_request(name, prompt, 3) for name, prompt in PROMPTS.items()])
        assert engine.stats().cached_tokens > 0
        found.append({name: tokens_of(output) for name, output in outputs.items()})
    assert found[0] == found[1]
