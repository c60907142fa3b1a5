"""gpt-oss' experts out of files of MXFP4: the values, the model's logits, and the memory that they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from engine.model_interface import LogitsResult
from engine.models.biased_experts import BiasedMoeMLP, unpacked
from engine.models.decoder import weights_bytes
from kernels.quantised import PackedQuantised
from tests.support.engines import load_engine
from tests.support.tiny_checkpoint import load_alone, make_checkpoint

EXPERTS = ("gate_up_proj", "down_proj")


def random_packed(num_experts: int, rows: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and exponents' bytes; values of about 0.1."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_experts, rows, width // 32, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(121, 125, (num_experts, rows, width // 32), generator=generator, dtype=torch.uint8)
    return blocks, exponents


def by_transformers(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """[E, K, N] float32."""
    whole: torch.Tensor = convert_moe_packed_tensors(blocks.clone(), exponents.clone(), dtype=torch.float32)
    return whole


def pack_experts(path: Path) -> dict[str, torch.Tensor]:
    """Give a checkpoint's experts random values of MXFP4; returns them by transformers' names and in its form."""
    tensors = load_file(path / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        num_experts, width, rows = tensors.pop(name).shape
        blocks, exponents = random_packed(num_experts, rows, width, seed=len(found))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, exponents
        found[name] = by_transformers(blocks, exponents)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (path / "config.json").write_text(json.dumps(config))
    return found


def test_every_value_is_that_of_the_file() -> None:
    blocks, exponents = random_packed(3, 6, 96, seed=1)
    blocks[0, 0, 0] = torch.arange(16, dtype=torch.uint8) * 17  # each of the 16 numbers
    exponents[1, 0, 0], exponents[1, 1, 0] = 0, 254
    weight = unpacked(blocks, exponents)
    whole = weight.values.float() * weight.scales.float().repeat_interleave(32, dim=-1)
    assert torch.equal(whole, by_transformers(blocks, exponents).transpose(1, 2))


def test_a_scale_that_is_no_number_shows() -> None:
    blocks, exponents = random_packed(1, 2, 32, seed=2)
    exponents[0, 1, 0] = 255
    assert unpacked(blocks, exponents).scales.isnan().tolist() == [[[False], [True]]]


@pytest.mark.parametrize("native", ["off", "auto"])
def test_logits_of_packed_experts_are_transformers(native: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt_oss")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    for name, values in pack_experts(path).items():
        parameters[name].data = values
    interface = load_engine(path, {"engine.native_kernels": native}).model_interface
    prompt = [7 * i % 250 for i in range(50)]
    result = interface.prefill("a", prompt)
    assert isinstance(result, LogitsResult)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(result.logits, expected, atol=1e-4, rtol=0)


def test_packed_experts_take_eight_bits_and_a_scale_for_32(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt_oss")
    plain = weights_bytes(load_alone(path))
    pack_experts(path)
    model = load_alone(path)
    mlp = next(iter(model.layers)).mlp
    assert isinstance(mlp, BiasedMoeMLP)
    assert isinstance(mlp.down_proj, PackedQuantised)
    num_elements = sum(6 * rows * width for rows, width in ((192, 64), (64, 96)))
    assert sum(each.nbytes for each in (mlp.gate_up_proj, mlp.down_proj)) == num_elements + num_elements // 32 * 2
    assert plain - weights_bytes(model) == 2 * (4 * num_elements - (num_elements + num_elements // 32 * 2))


# openai/gpt-oss-20b, without its layer types, which are the default.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_the_published_file_is_read() -> None:
    config = ModelConfig.from_hf(PUBLISHED)
    assert config.moe is not None
    assert config.moe.clamp is not None
    assert (config.moe.clamp.alpha, config.moe.clamp.limit, config.moe.experts_per_token) == (1.702, 7.0, 4)
    assert (config.window, config.windowed_layers) == (128, frozenset(range(0, 24, 2)))
    assert (config.qkv_bias, config.output_bias, config.has_sinks, config.dtype) == (True, True, True, "bfloat16")
    assert config.max_position_embeddings == 131072


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": False}, "attention_bias is False"),
        ({"rope_scaling": None}, "rope_type is missing"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "quantization_config is"),
        ({"model_type": "qwen3", "architectures": None, "attention_bias": False}, "quantization_config is"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.from_hf(PUBLISHED | change)
