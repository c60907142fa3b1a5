from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from engine.checkpoint.config_reader import ConfigReader
from engine.checkpoint.rope import RopeConfig, inverse_frequencies, rope_cos_sin

DEFAULT = {"rope_type": "default", "rope_theta": 1000000.0}
LLAMA3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("rotary", "config_class", "parameters"),
    [
        (Qwen3RotaryEmbedding, Qwen3Config, DEFAULT),
        (LlamaRotaryEmbedding, LlamaConfig, {**DEFAULT, "rope_theta": 10000.0}),
        (LlamaRotaryEmbedding, LlamaConfig, LLAMA3_1),
        (LlamaRotaryEmbedding, LlamaConfig, {**LLAMA3_1, "factor": 32.0}),
        (LlamaRotaryEmbedding, LlamaConfig, {**LLAMA3_1, "original_max_position_embeddings": 256}),
    ],
)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 128])
def test_the_table_is_bit_equal_with_transformers(
    rotary: Any, config_class: Any, parameters: dict[str, Any], head_dim: int
) -> None:
    config = config_class(head_dim=head_dim, rope_parameters=dict(parameters), max_position_embeddings=32768)
    module = rotary(config)
    reader = ConfigReader(json.loads(config.to_json_string()), "config.json")
    rope = RopeConfig.from_reader(reader, 32768)
    cos, sin = module(torch.zeros(1), torch.arange(3000)[None])
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    table = rope_cos_sin(rope, head_dim, 3000)
    assert table.dtype == torch.float32
    assert table.shape == (3000, head_dim)
    assert table.is_contiguous()
    assert torch.equal(inverse_frequencies(rope, head_dim), module.inv_freq)
    assert torch.equal(table, expected)
