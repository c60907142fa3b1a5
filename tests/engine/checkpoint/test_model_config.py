"""A decoder's config.json, and the rotary tables made from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from engine.checkpoint.config_reader import ConfigReader
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope import Llama3Scaling, RopeConfig, RopeRules, inverse_frequencies, rope_cos_sin
from engine.errors import CheckpointError
from tests.support.tiny_checkpoint import decoder_config, make_checkpoint, make_model
from tests.support.tiny_families import FAMILY_DEFAULTS, Family

# The keys of the published files, in the form transformers wrote before version 5.
LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}

DEFAULT = {"rope_type": "default", "rope_theta": 1000000.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_a_published_llama_file_is_read() -> None:
    config = ModelConfig.from_hf(LLAMA_3_2_1B)
    assert (config.architecture, config.dtype, config.qk_norm, config.moe) == ("llama", "bfloat16", False, None)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (16, 32, 8, 64)
    assert config.tie_word_embeddings
    assert config.rope.theta == 500000.0
    assert config.rope.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)


def test_a_published_mixture_of_experts_file_is_read() -> None:
    config = ModelConfig.from_hf(QWEN3_30B_A3B)
    assert config.architecture == "qwen3_moe"
    assert config.qk_norm
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.intermediate_size) == (128, 8, 768)
    assert config.moe.norm_topk_prob
    assert all(config.is_moe_layer(layer) for layer in range(48))
    assert config.rope.scaling is None


@pytest.mark.parametrize("family", FAMILY_DEFAULTS)
def test_what_transformers_5_writes_is_read(tmp_path: Path, family: Family) -> None:
    config = decoder_config(make_checkpoint(tmp_path, family, dtype="bfloat16"))
    assert (config.architecture, config.dtype, config.head_dim) == (family, "bfloat16", 16)
    assert (config.rope.scaling is not None) == (family in ("llama", "olmo3", "gemma3_text", "gpt_oss"))
    assert (config.moe is not None) == ("moe" in family or family in ("mixtral", "gpt_oss"))


@pytest.mark.parametrize(("step", "dense"), [(1, []), (2, []), (1, [0, 3]), (3, [2]), (2, [0])])
def test_expert_layers_are_those_of_transformers(step: int, dense: list[int]) -> None:
    model = make_model("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=step, mlp_only_layers=dense)
    config = ModelConfig.from_hf(json.loads(model.config.to_json_string()))
    expected = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert [config.is_moe_layer(layer) for layer in range(6)] == expected


def test_the_older_and_the_newer_form_of_a_file_mean_the_same() -> None:
    newer = {key: value for key, value in LLAMA_3_2_1B.items() if not key.startswith(("rope", "torch_dtype"))}
    newer["dtype"] = "bfloat16"
    newer["rope_parameters"] = {**LLAMA_3_2_1B["rope_scaling"], "rope_theta": 500000.0}
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf(LLAMA_3_2_1B)
    moe = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert ModelConfig.from_hf(moe) == ModelConfig.from_hf(QWEN3_30B_A3B)


def test_head_dim_defaults_to_what_the_family_defaults_to() -> None:
    assert ModelConfig.from_hf(QWEN3).head_dim == 128
    assert ModelConfig.from_hf(QWEN3 | {"head_dim": None}).head_dim == 128
    assert ModelConfig.from_hf(QWEN3 | {"head_dim": 96}).head_dim == 96
    assert ModelConfig.from_hf(LLAMA_3_2_1B | {"head_dim": None, "hidden_size": 4096}).head_dim == 128


def test_llama_without_kv_heads_has_as_many_as_query_heads() -> None:
    without = {key: value for key, value in LLAMA_3_2_1B.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(without).num_kv_heads == 32


def test_llama_without_rope_theta_has_ten_thousand() -> None:
    without = {key: value for key, value in LLAMA_3_2_1B.items() if not key.startswith("rope")}
    assert ModelConfig.from_hf(without).rope.theta == 10000.0


def test_llama3_scaling_without_its_original_context_takes_the_context() -> None:
    scaling = {key: value for key, value in LLAMA_3_2_1B["rope_scaling"].items() if not key.startswith("orig")}
    config = ModelConfig.from_hf(LLAMA_3_2_1B | {"rope_scaling": scaling})
    assert isinstance(config.rope.scaling, Llama3Scaling)
    assert config.rope.scaling.original_max_position_embeddings == 131072


def test_yarn_stretches_the_context_that_the_file_was_made_for() -> None:
    assert ModelConfig.from_hf(QWEN3 | {"rope_scaling": YARN}).max_position_embeddings == 40960
    longer = YARN | {"original_max_position_embeddings": 32768}
    assert ModelConfig.from_hf(QWEN3 | {"rope_scaling": longer}).max_position_embeddings == 131072
    without = {key: value for key, value in YARN.items() if not key.startswith("orig")}
    assert ModelConfig.from_hf(QWEN3 | {"rope_scaling": without}).max_position_embeddings == 4 * 40960


def test_a_sliding_window_that_is_not_in_use_is_fine() -> None:
    unused = {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 2}
    assert ModelConfig.from_hf(QWEN3 | unused) == ModelConfig.from_hf(QWEN3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"model_type": None}, "model_type is missing"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "architectures is ['Qwen3ForTokenClassification']"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: quant_method is 'hqq'"),
        ({"compression_config": {}}, "compression_config is {}"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map is"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"is_causal": False}, "is_causal is False"),
        ({"attention_bias": "no"}, "attention_bias is 'no'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ({"layer_types": ["full_attention"]}, "layer_types is"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling: rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "rope_scaling: beta_fast is 1"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "rope_scaling: factor is 0"),
        ({"rope_scaling": {**YARN, "mscale": "1"}}, "rope_scaling: mscale is '1'"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling: truncate is 1"),
        ({"rope_scaling": {"type": "default", "rope_type": "llama3"}}, "rope_type is 'llama3' and type"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling: factor is 2.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: low_freq_factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling is [1]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters: full_attention is"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters: rope_theta is 'big'"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": "1024"}, "hidden_size is '1024'"),
        ({"hidden_size": 1024.0}, "hidden_size is 1024.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
        ({"torch_dtype": "float16"}, "dtype is 'bfloat16' and torch_dtype"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        ModelConfig.from_hf(QWEN3 | change)
    assert str(caught.value).startswith("config.json")
    assert "accepted:" in str(caught.value) or "older name" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_local_experts": 64}, "num_local_experts is 64 and num_experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers is [48]"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
    ],
)
def test_expert_keys_that_make_no_sense_are_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)):
        ModelConfig.from_hf(QWEN3_30B_A3B | change)


def test_qwen3_must_name_its_kv_heads() -> None:
    without = {key: value for key, value in QWEN3.items() if key != "num_key_value_heads"}
    with pytest.raises(CheckpointError, match="num_key_value_heads is missing"):
        ModelConfig.from_hf(without)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "there is no such file"),
        (b"{", "not valid JSON"),
        (b"[]", "holds a JSON list"),
        (b"[" * 200_000, "not valid JSON"),
        (b"\xff\xfe", "not valid UTF-8"),
        (b" " * (1 << 20) + b"{}", "accepted: at most 1048576"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes | None, named: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        decoder_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("rotary", "config_class", "parameters"),
    [
        (Qwen3RotaryEmbedding, Qwen3Config, DEFAULT),
        (LlamaRotaryEmbedding, LlamaConfig, {**DEFAULT, "rope_theta": 10000.0}),
        (LlamaRotaryEmbedding, LlamaConfig, LLAMA3_1),
        (LlamaRotaryEmbedding, LlamaConfig, {**LLAMA3_1, "factor": 32.0}),
        (LlamaRotaryEmbedding, LlamaConfig, {**LLAMA3_1, "original_max_position_embeddings": 256}),
        (LlamaRotaryEmbedding, LlamaConfig, {**DEFAULT, "rope_type": "linear", "factor": 2.5}),
        (Qwen3RotaryEmbedding, Qwen3Config, YARN),
        (Qwen3RotaryEmbedding, Qwen3Config, {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}),
        (Qwen3RotaryEmbedding, Qwen3Config, {**YARN, "attention_factor": 0.75}),
        (Qwen3RotaryEmbedding, Qwen3Config, {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "factor": 40.0}),
        (Qwen3RotaryEmbedding, Qwen3Config, {**YARN, "mscale": 0.7, "factor": 0.5}),
        (Qwen3RotaryEmbedding, Qwen3Config, {**YARN, "original_max_position_embeddings": 8}),
    ],
)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 128])
def test_the_table_is_bit_equal_with_transformers(
    rotary: Any, config_class: Any, parameters: dict[str, Any], head_dim: int
) -> None:
    config = config_class(head_dim=head_dim, rope_parameters=dict(parameters), max_position_embeddings=32768)
    module = rotary(config)
    reader = ConfigReader(json.loads(config.to_json_string()), "config.json")
    rope = RopeConfig.from_reader(reader, 32768, RopeRules(), head_dim)
    cos, sin = module(torch.zeros(1), torch.arange(3000)[None])
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    table = rope_cos_sin(rope, head_dim, 3000)
    assert table.dtype == torch.float32
    assert table.shape == (3000, head_dim)
    assert table.is_contiguous()
    assert torch.equal(inverse_frequencies(rope, 3000), module.inv_freq)
    assert torch.equal(table, expected)


@pytest.mark.parametrize("num_positions", [64, 65], ids=["within the context before", "beyond it"])
@pytest.mark.parametrize(("head_dim", "share"), [(64, 0.75), (16, 0.75), (32, 1.0)])
def test_longropes_table_is_bit_equal_where_it_rotates(head_dim: int, share: float, num_positions: int) -> None:
    num_rotated = int(head_dim * share)
    factors = [1.0 + pair / 7 for pair in range(num_rotated // 2)]
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": share}
    parameters |= {"short_factor": factors, "long_factor": [2.5 * factor for factor in factors]}
    shape = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim}
    contexts = {"max_position_embeddings": 1024, "original_max_position_embeddings": 64}
    config = Phi3Config(rope_parameters=parameters, **shape, **contexts)
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions)[None])
    rope = ModelConfig.from_hf(json.loads(config.to_json_string()) | {"dtype": "float32"}).rope
    table = rope_cos_sin(rope, head_dim, num_positions)
    halves = ((cos[0], 1.0), (sin[0], 0.0))
    for found, (expected, unrotated) in zip(table.chunk(2, dim=-1), halves, strict=True):
        assert torch.equal(found[:, : num_rotated // 2], expected[:, : num_rotated // 2])
        assert bool((found[:, num_rotated // 2 :] == unrotated).all())
