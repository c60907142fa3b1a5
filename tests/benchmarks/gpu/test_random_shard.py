from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.files import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from tests.benchmarks.gpu.gpu_model import MODELS
from tests.benchmarks.gpu.random_shard import STANDARD_DEVIATION, random_checkpoint
from tests.benchmarks.gpu.weight_shapes import weight_shapes
from tests.support.tiny_checkpoint import Family, make_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", {"mlp_only_layers": [1], "num_hidden_layers": 3}),
    ],
)
def test_names_and_shapes_are_those_that_transformers_writes(
    tmp_path: Path, family: Family, options: dict[str, Any]
) -> None:
    path = make_checkpoint(tmp_path, family, **options)
    with Checkpoint.open(path) as written:
        expected = {name: written.shape(name) for name in written.names()}
    assert weight_shapes(ModelConfig.from_hf(json.loads((path / "config.json").read_text()))) == expected


def test_a_tensor_depends_on_its_name_alone_and_no_two_are_equal() -> None:
    config = MODELS["Qwen3-30B-A3B"].tiny().parsed
    first, second = random_checkpoint(config, CPU), random_checkpoint(config, CPU)
    experts = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in (0, 1) for expert in (0, 1)]
    drawn = [first.read(name) for name in experts]
    assert all(torch.equal(second.read(name), tensor) for name, tensor in zip(experts, drawn, strict=True))
    assert len({float(tensor.sum()) for tensor in drawn}) == 4
    assert all(float(tensor.std()) == pytest.approx(STANDARD_DEVIATION, rel=0.15) for tensor in drawn)
    assert first.total_bytes == sum(first.read(name).nbytes for name in first.names())
