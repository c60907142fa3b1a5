"""A resume state of another request or another model is dropped: the request starts over."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.weights import Checkpoint
from engine.engine import Engine
from engine.models.load import load_decoder
from engine.models.placement import ModelPlacement
from engine.request import Completion, Request, ResumeState, SequenceResumeState
from engine.resume import model_fingerprint
from engine.sampling_params import SamplingParams
from kernels.dispatch import deterministic_operations, operations
from tests.support.engines import interrupted, load_engine, run_all
from tests.support.tiny_checkpoint import decoder_config, make_checkpoint

PROMPT = tuple(range(30))
MAX_TOKENS = 20

CPU = torch.device("cpu")
LAYER = "model.layers.1."
FIRST_OF_EACH_WEIGHT = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(f"{LAYER}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"{LAYER}self_attn.{name}.weight" for name in ("q_proj", "o_proj", "q_norm", "k_norm")),
    *(f"{LAYER}mlp.{name}.weight" for name in ("gate", "experts.0.gate_proj", "experts.0.down_proj")),
]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return load_engine(tiny_model)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Sequence[Completion]:
    """The completions of the request when it runs undisturbed."""
    return run_all(engine, [_request()])["r"].completions


def _request(**params: Any) -> Request:
    drawn: Mapping[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    options = {"max_tokens": MAX_TOKENS, "ignore_eos": True, **drawn, **params}
    return Request("r", PROMPT, SamplingParams(**options))


def _generated(engine: Engine) -> int:
    return engine.stats().generated_tokens


def _damaged(resume_state: ResumeState) -> dict[str, ResumeState]:
    (sequence,) = resume_state.sequences
    long = SequenceResumeState((65,) * (MAX_TOKENS + 1), None)
    return {
        "another model": replace(resume_state, identity="0" * 32),
        "sequences": replace(resume_state, sequences=(sequence, sequence)),
        "vocabulary": replace(resume_state, sequences=(SequenceResumeState((65, 320), None),)),
        "negative": replace(resume_state, sequences=(SequenceResumeState((-1,), None),)),
        "goes on after its end": replace(resume_state, sequences=(long,)),
        "logprobs": replace(resume_state, sequences=(replace(sequence, logprobs=()),)),
        "its seed": replace(resume_state, base_seed=8),
    }


@pytest.mark.parametrize(
    "damage",
    ["another model", "sequences", "vocabulary", "negative", "goes on after its end", "logprobs", "its seed"],
)
def test_a_resume_state_of_another_request_is_dropped_with_a_warning(
    engine: Engine, expected: Sequence[Completion], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    request = _request()
    resume_state = _damaged(interrupted(engine, request, 10))[damage]
    before = _generated(engine)
    with caplog.at_level(logging.WARNING, logger="engine.resume"):
        output = run_all(engine, [replace(request, resume=resume_state)])["r"]
    assert output.completions == expected
    assert output.num_resumed_tokens == 0
    assert _generated(engine) - before == MAX_TOKENS
    assert "request r is dropped" in caplog.text


@pytest.mark.parametrize("changed", [{"seed": 8}, {"max_tokens": 19}, {"stop": ("x",)}, {"logprobs": 1}])
def test_other_parameters_are_another_request(
    engine: Engine, caplog: pytest.LogCaptureFixture, changed: dict[str, Any]
) -> None:
    resume_state = interrupted(engine, _request(), 10)
    request = _request(**changed)
    expected = run_all(engine, [request])["r"].completions
    assert run_all(engine, [replace(request, resume=resume_state)])["r"].completions == expected
    assert "another model, prompt or parameters" in caplog.text


def test_another_model_of_the_same_shape_takes_no_resume_state(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = _request()
    resume_state = interrupted(engine, request, 10)
    tuned = load_engine(make_checkpoint(tmp_path / "tiny", "qwen3", seed=1, initializer_range=0.6))
    run_all(tuned, [replace(request, resume=resume_state)])
    assert "another model" in caplog.text
    assert _generated(tuned) == MAX_TOKENS


def fingerprint(path: Path, *, deterministic: bool = False) -> str:
    ops = deterministic_operations(CPU) if deterministic else operations(CPU)
    placement = ModelPlacement(CPU, torch.float32, ops, max_positions=64, bucketed_min_tokens=8)
    with Checkpoint.open(path) as checkpoint:
        model = load_decoder(decoder_config(path), checkpoint, placement)
    return model_fingerprint(model)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("fingerprint"), "qwen3_moe")


def test_the_same_weights_loaded_twice_are_the_same(model_dir: Path) -> None:
    assert fingerprint(model_dir) == fingerprint(model_dir) != fingerprint(model_dir, deterministic=True)


@pytest.mark.parametrize("name", FIRST_OF_EACH_WEIGHT)
def test_one_other_element_in_any_weight_is_another_model(model_dir: Path, name: str) -> None:
    file = model_dir / "model.safetensors"
    before, stored = fingerprint(model_dir), file.read_bytes()
    weights = load_file(file)
    weights[name].view(-1)[0] += 1
    save_file(weights, file, metadata={"format": "pt"})
    try:
        assert fingerprint(model_dir) != before
    finally:
        file.write_bytes(stored)
