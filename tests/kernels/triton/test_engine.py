"""The engine on the Triton kernels: same tokens as on a CPU, and on a GPU nothing is compiled after the warm-up."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction

import kernels.triton
from engine.engine import Engine
from engine.request import Request, RequestOutput
from engine.sampling_params import SamplingParams
from tests.support.compiled_kernels import counted_compilations
from tests.support.devices import simulated_device
from tests.support.engines import greedy_request, load_engine, run_all
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.tiny_families import Family

PREFIX = list(range(5, 25))  # more than a block, so that later requests hit it
# Small enough that chunks, a preemption and prefix hits happen in a few steps: the interpreter takes 0.1 s a step.
LIMITS = {
    "engine.native_kernels": "off",  # they go before what is put in the place of a CPU's operations
    "engine.max_num_seqs": "3",
    "engine.max_num_batched_tokens": "16",
    "engine.kv_cache.num_blocks": "9",
    "engine.moe.bucketed_min_tokens": "6",
}

# The interpreter takes a second for a step and everything the sampler can do to its rows.
SMALLEST_LIMITS = {
    "engine.native_kernels": "off",
    "engine.max_num_seqs": "1",
    "engine.max_num_batched_tokens": "4",
    "engine.kv_cache.num_blocks": "9",
    "engine.shared_prefix.enabled": "off",
}


def requests() -> list[Request]:
    sampled = SamplingParams(
        max_tokens=5, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=7, repetition_penalty=1.2, logprobs=2
    )
    biased = SamplingParams(max_tokens=4, temperature=1.0, seed=-3, logit_bias={9: 2.0}, min_tokens=2, n=2)
    return [
        greedy_request("long", [*PREFIX, 40, 41, 42], 6),
        Request("sampled", (*PREFIX, 50), sampled),
        Request("biased", (3, 4), biased),
        greedy_request("short", [7], 5),
    ]


def outputs_of(engine: Engine) -> dict[str, RequestOutput]:
    return run_all(engine, requests())


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_the_engine_gives_the_same_tokens_as_on_the_cpu_kernels(
    family: Family, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family, num_hidden_layers=1)
    expected = outputs_of(load_engine(tmp_path, LIMITS))

    if device.type == "cpu":
        monkeypatch.setattr("engine.models.placement.operations", lambda device: kernels.triton)
    engine = load_engine(tmp_path, {**LIMITS, "engine.device": device.type})

    found = outputs_of(engine)
    for request_id, output in expected.items():
        assert output.error is None
        assert [c.token_ids for c in found[request_id].completions] == [c.token_ids for c in output.completions]
        assert [c.finish_reason for c in found[request_id].completions] == [c.finish_reason for c in output.completions]
    assert engine.stats().cached_tokens > 0


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
            engine = load_engine(tmp_path, {**SMALLEST_LIMITS, "engine.device": device.type})
        assert bool(compiled) is is_gpu  # the interpreter compiles nothing
        del compiled[:]
        run_all(
            engine, [greedy_request("greedy", range(5, 13), 2), Request("drawn", (7, 8), SamplingParams(2, top_k=5))]
        )
        assert compiled == []
    profile = engine.model_interface.status().memory_profile
    assert profile is not None
    assert is_gpu or profile.activations_bytes > 0  # on a GPU 0 where an earlier test's memory was still reserved
    assert profile.kv_bytes > 0
