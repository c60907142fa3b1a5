"""The engine on the Triton kernels: everything it hands them is what they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kernels.triton
from engine.engine import Engine
from engine.request import Request, RequestOutput
from engine.sampling_params import SamplingParams
from tests.support.engines import greedy_request, load_engine, run_all
from tests.support.tiny_checkpoint import Family, make_checkpoint

PREFIX = list(range(5, 25))  # more than a block, so that later requests hit it
# Small enough that chunks, a preemption and prefix hits happen in a few steps: the interpreter takes 0.1 s a step.
LIMITS = {
    "engine.max_num_seqs": "3",
    "engine.max_num_batched_tokens": "16",
    "engine.kv_cache.num_blocks": "9",
    "engine.moe.bucketed_min_tokens": "6",
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
