"""Checkpoints of a prompt go on under the same weights alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.files import Checkpoint
from engine.models.load import load_decoder
from engine.models.placement import ModelPlacement
from engine.resume import model_fingerprint
from kernels.dispatch import deterministic_operations, operations
from tests.support.decoder_config import decoder_config
from tests.support.tiny_checkpoint import make_checkpoint

CPU = torch.device("cpu")
LAYER = "model.layers.1."
FIRST_OF_EACH_WEIGHT = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(f"{LAYER}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"{LAYER}self_attn.{name}.weight" for name in ("q_proj", "o_proj", "q_norm", "k_norm")),
    *(f"{LAYER}mlp.{name}.weight" for name in ("gate", "experts.0.gate_proj", "experts.0.down_proj")),
]


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
