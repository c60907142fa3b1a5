"""After the warm-up nothing is compiled: every launch of a job has been made before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import kernels.triton
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.support.engines import load_engine, run_all
from tests.support.simulated_memory import simulated_device
from tests.support.specialisations import recorded_specialisations
from tests.support.tiny_checkpoint import Family, make_checkpoint

SETTINGS = {
    "engine.dtype": "bfloat16",
    "engine.max_num_seqs": "12",
    "engine.max_num_batched_tokens": "700",
    "engine.kv_cache.num_blocks": "250",
}
# As many as Qwen3-30B-A3B has, for which the launches were tuned.
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 16}


def _request(rng: random.Random, number: int, prefix: list[int]) -> Request:
    prompt = [rng.randrange(3, 300) for _ in range(rng.choice([1, 2, 3, 17, 60, 250, 900]))]
    params = SamplingParams(
        max_tokens=rng.choice([1, 2, 5]),
        temperature=rng.choice([0.0, 0.8]),
        top_k=rng.choice([0, 20]),
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logprobs=rng.choice([None, 3]),
        prompt_logprobs=rng.choice([None, None, 3]),
        ignore_eos=True,
    )
    return Request(f"r{number}", tuple([*rng.choice([[], prefix]), *prompt][:1000]), params)


@pytest.mark.parametrize(("family", "shape", "shares"), [("llama", {}, "off"), ("qwen3_moe", EXPERTS, "on")])
def test_no_job_leads_to_a_compilation_after_the_warm_up(
    family: Family, shape: dict[str, Any], shares: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family, num_hidden_layers=1, **shape)
    monkeypatch.setattr("engine.models.placement.operations", lambda _: kernels.triton)
    rng = random.Random(7)
    prefix = [rng.randrange(3, 300) for _ in range(64)]
    with recorded_specialisations(90) as compiled:
        with simulated_device(1 << 33):
            engine = load_engine(tmp_path, SETTINGS | {"engine.shared_prefix.enabled": shares})
        warmed_up = list(compiled)
        assert len(warmed_up) == len(set(warmed_up)) >= 15
        run_all(engine, [_request(rng, number, prefix) for number in range(40)])
    assert compiled == warmed_up
