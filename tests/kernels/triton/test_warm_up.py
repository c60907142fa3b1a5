"""The warm-up on the Triton kernels themselves: it runs through, and on a GPU nothing is compiled after it."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction

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


def _forget_compiled_kernels() -> None:
    """Other tests of this process may have launched the same; what is on the disk still counts as compiled."""
    for kernel in gc.get_objects():
        if type(kernel) is JITFunction and kernel.module.startswith("kernels.triton."):
            kernel.device_caches.clear()


def test_after_the_warm_up_nothing_is_compiled(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=16)
    is_gpu = device.type == "cuda"
    if not is_gpu:
        monkeypatch.setattr("engine.models.placement.operations", lambda _: kernels.triton)
    _forget_compiled_kernels()
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
    assert is_gpu or profile.activations_bytes > 0  # on a GPU 0 where an earlier test's memory was still reserved
    assert profile.kv_bytes > 0
