"""The warm-up on the Triton kernels themselves: it runs through, and on a GPU nothing is compiled after it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import kernels.triton
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.support.compilations import counted_compilations
from tests.support.engines import greedy_request, load_engine, run_all
from tests.support.simulated_memory import simulated_device
from tests.support.tiny_checkpoint import make_checkpoint

# The interpreter takes a second for a step and everything the sampler can do to its rows.
LIMITS = {
    "engine.max_num_seqs": "1",
    "engine.max_num_batched_tokens": "4",
    "engine.kv_cache.num_blocks": "9",
    "engine.shared_prefix.enabled": "off",
}


def test_after_the_warm_up_nothing_is_compiled(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=16)
    is_gpu = device.type == "cuda"
    if not is_gpu:
        monkeypatch.setattr("engine.loading.choose_operations.operations", lambda _: kernels.triton)
    with counted_compilations() as compiled:
        with nullcontext() if is_gpu else simulated_device(1 << 33):
            engine = load_engine(tmp_path, {**LIMITS, "engine.device": device.type})
        assert bool(compiled) is is_gpu  # the interpreter compiles nothing
        del compiled[:]
        run_all(
            engine, [greedy_request("greedy", range(5, 13), 2), Request("drawn", (7, 8), SamplingParams(2, top_k=5))]
        )
        assert compiled == []
    profile = engine.runner.status().memory_profile
    assert profile is not None
    assert profile.activations_bytes > 0
    assert profile.kv_bytes > 0
