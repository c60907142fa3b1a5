"""What families of decoders other than Llama and Qwen3 say in config.json, by their published files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.families import DECODERS, ENCODERS, REFUSED
from engine.checkpoint.model_config import ModelConfig, Multipliers, read_config
from engine.checkpoint.moe_config import GroupedSigmoid
from engine.checkpoint.rope import LongRopeScaling, RopeConfig
from engine.errors import CheckpointError
from tests.support.tiny_families import FAMILY_DEFAULTS

# Published files without what says nothing of the arithmetic, in the form transformers wrote before version 5.
_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def _published(model_type: str, shape: tuple[int, int, int, int, int], **more: object) -> dict[str, Any]:
    """shape: hidden size, intermediate size, layers, heads, KV heads."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {"model_type": model_type, **_COMMON, **dict(zip(names, shape, strict=True)), **more}


FILES: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B-Instruct": _published(
        "qwen2",
        (3584, 18944, 28, 28, 4),
        architectures=["Qwen2ForCausalLM"],
        max_position_embeddings=32768,
        max_window_layers=28,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        sliding_window=131072,
        tie_word_embeddings=False,
        use_sliding_window=False,
        vocab_size=152064,
    ),
    "Mistral-7B-Instruct-v0.3": _published(
        "mistral",
        (4096, 14336, 32, 32, 8),
        architectures=["MistralForCausalLM"],
        max_position_embeddings=32768,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        sliding_window=None,
        tie_word_embeddings=False,
        vocab_size=32768,
    ),
    "Mixtral-8x7B-Instruct-v0.1": _published(
        "mixtral",
        (4096, 14336, 32, 32, 8),
        architectures=["MixtralForCausalLM"],
        max_position_embeddings=32768,
        num_experts_per_tok=2,
        num_local_experts=8,
        output_router_logits=False,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.02,
        sliding_window=None,
        tie_word_embeddings=False,
        vocab_size=32000,
    ),
    "phi-4": _published(
        "phi3",
        (5120, 17920, 40, 40, 10),
        architectures=["Phi3ForCausalLM"],
        attention_bias=False,
        embd_pdrop=0.0,
        max_position_embeddings=16384,
        original_max_position_embeddings=16384,
        resid_pdrop=0.0,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=250000,
        sliding_window=None,
        tie_word_embeddings=False,
        vocab_size=100352,
    ),
    # Its lists of factors are 48 numbers each; these are no published ones.
    "Phi-4-mini-instruct": _published(
        "phi3",
        (3072, 8192, 32, 24, 8),
        architectures=["Phi3ForCausalLM"],
        attention_bias=False,
        embd_pdrop=0.0,
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        max_position_embeddings=131072,
        mlp_bias=False,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        resid_pdrop=0.0,
        rms_norm_eps=1e-05,
        rope_scaling={"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        rope_theta=10000.0,
        sliding_window=None,
        tie_word_embeddings=True,
        vocab_size=200064,
    ),
    "SmolLM3-3B": _published(
        "smollm3",
        (2048, 11008, 36, 16, 4),
        architectures=["SmolLM3ForCausalLM"],
        attention_bias=False,
        layer_types=["full_attention"] * 36,
        max_position_embeddings=65536,
        max_window_layers=28,
        mlp_bias=False,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9,
        pretraining_tp=2,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=5000000.0,
        sliding_window=None,
        use_sliding_window=False,
        vocab_size=128256,
    ),
    "OLMo-2-1124-7B-Instruct": _published(
        "olmo2",
        (4096, 11008, 32, 32, 32),
        architectures=["Olmo2ForCausalLM"],
        attention_bias=False,
        max_position_embeddings=4096,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=500000,
        tie_word_embeddings=False,
        vocab_size=100352,
    ),
    "Qwen1.5-MoE-A2.7B-Chat": _published(
        "qwen2_moe",
        (2048, 5632, 24, 16, 16),
        architectures=["Qwen2MoeForCausalLM"],
        decoder_sparse_step=1,
        max_position_embeddings=8192,
        max_window_layers=21,
        moe_intermediate_size=1408,
        norm_topk_prob=False,
        num_experts=60,
        num_experts_per_tok=4,
        output_router_logits=False,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=5632,
        sliding_window=32768,
        tie_word_embeddings=False,
        use_sliding_window=False,
        vocab_size=151936,
    ),
    "GLM-4.5-Air": _published(
        "glm4_moe",
        (4096, 10944, 46, 96, 8),
        architectures=["Glm4MoeForCausalLM"],
        attention_bias=True,
        first_k_dense_replace=1,
        head_dim=128,
        max_position_embeddings=131072,
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=128,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_nextn_predict_layers=1,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=1000000,
        routed_scaling_factor=1.0,
        tie_word_embeddings=False,
        topk_group=1,
        use_qk_norm=False,
        vocab_size=151552,
    ),
    "granite-3.1-3b-a800m-instruct": _published(
        "granitemoe",
        (1536, 512, 32, 24, 8),
        architectures=["GraniteMoeForCausalLM"],
        attention_bias=False,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=6.0,
        max_position_embeddings=131072,
        num_experts_per_tok=8,
        num_local_experts=40,
        output_router_logits=False,
        residual_multiplier=0.22,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=10000000.0,
        router_aux_loss_coef=0.0,
        tie_word_embeddings=True,
        vocab_size=49155,
    ),
    "granite-3.3-8b-instruct": _published(
        "granite",
        (4096, 12800, 40, 32, 8),
        architectures=["GraniteForCausalLM"],
        attention_bias=False,
        attention_multiplier=0.0078125,
        embedding_multiplier=12.0,
        logits_scaling=16.0,
        max_position_embeddings=131072,
        mlp_bias=False,
        residual_multiplier=0.22,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=10000000.0,
        tie_word_embeddings=True,
        vocab_size=49159,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_is_read(name: str) -> None:
    config = ModelConfig.from_hf(FILES[name])
    head_dim = 64 if name == "granite-3.1-3b-a800m-instruct" else 128
    assert (config.architecture, config.head_dim) == (FILES[name]["model_type"], head_dim)
    assert (config.rope.scaling is None) == (name != "Phi-4-mini-instruct")
    assert config.rope.theta == FILES[name]["rope_theta"]
    assert config.tie_word_embeddings == (name.startswith("granite") or name in ("Phi-4-mini-instruct", "SmolLM3-3B"))
    assert config.qkv_bias == (name in ("Qwen2.5-7B-Instruct", "Qwen1.5-MoE-A2.7B-Chat", "GLM-4.5-Air"))
    assert config.fuses_projections == name.lower().startswith("phi-4")
    assert not config.qk_norm
    assert config.wide_qk_norm == (config.norms.before_mlp is None) == name.startswith("OLMo")


def test_what_a_published_file_alone_has_is_read() -> None:
    mixtral = ModelConfig.from_hf(FILES["Mixtral-8x7B-Instruct-v0.1"])
    assert mixtral.moe is not None
    assert (mixtral.moe.num_experts, mixtral.moe.experts_per_token, mixtral.moe.intermediate_size) == (8, 2, 14336)
    assert mixtral.moe.norm_topk_prob
    assert all(map(mixtral.is_moe_layer, range(32)))
    qwen = ModelConfig.from_hf(FILES["Qwen1.5-MoE-A2.7B-Chat"]).moe
    assert qwen is not None
    assert (qwen.num_experts, qwen.intermediate_size, qwen.shared_size, qwen.norm_topk_prob) == (60, 1408, 5632, False)
    assert not ModelConfig.from_hf(FILES["Qwen1.5-MoE-A2.7B-Chat"] | {"qkv_bias": False}).qkv_bias
    glm = ModelConfig.from_hf(FILES["GLM-4.5-Air"])
    assert glm.moe is not None
    assert (glm.moe.num_experts, glm.moe.shared_size, glm.moe.norm_topk_prob) == (128, 1408, True)
    assert glm.moe.grouped_sigmoid == GroupedSigmoid(num_groups=1, chosen_groups=1, scale=1.0)
    assert (glm.moe.sparse_layers, glm.num_extra_layers, glm.rope.num_rotated) == (frozenset(range(1, 46)), 1, 64)
    assert ModelConfig.from_hf(FILES["GLM-4.5-Air"] | {"use_qk_norm": True}).qk_norm
    granite_moe = ModelConfig.from_hf(FILES["granite-3.1-3b-a800m-instruct"])
    assert granite_moe.moe is not None
    assert (granite_moe.moe.num_experts, granite_moe.moe.intermediate_size, granite_moe.moe.shared) == (40, 512, None)
    assert (granite_moe.moe.norm_topk_prob, granite_moe.multipliers.logits) == (True, 6.0)
    granite = ModelConfig.from_hf(FILES["granite-3.3-8b-instruct"])
    assert granite.attention_scale == 0.0078125
    assert granite.multipliers == Multipliers(embedding=12.0, residual=0.22, logits=16.0)
    phi4_mini = ModelConfig.from_hf(FILES["Phi-4-mini-instruct"])
    assert phi4_mini.rope == RopeConfig(
        theta=10000.0,
        scaling=LongRopeScaling((1.0,) * 48, (2.0,) * 48, 4096, math.sqrt(1 + math.log(32) / math.log(4096))),
        num_rotated=96,
    )
    smollm3 = ModelConfig.from_hf(FILES["SmolLM3-3B"])
    assert smollm3.unrotated_layers == frozenset(range(3, 36, 4))
    without = {key: value for key, value in FILES["SmolLM3-3B"].items() if key != "no_rope_layers"}
    assert ModelConfig.from_hf(without) == smollm3


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    def of(name: str, *left_out: str) -> ModelConfig:
        return ModelConfig.from_hf({key: value for key, value in FILES[name].items() if key not in left_out})

    assert of("Mixtral-8x7B-Instruct-v0.1", "rope_theta").rope.theta == 1_000_000.0
    assert of("SmolLM3-3B", "rope_theta", "rope_scaling").rope.theta == 2_000_000.0
    assert of("phi-4", "num_key_value_heads").num_kv_heads == 40
    left_out = ("partial_rotary_factor", "norm_topk_prob", "first_k_dense_replace", "n_shared_experts", "n_group")
    assert of("GLM-4.5-Air", *left_out) == ModelConfig.from_hf(FILES["GLM-4.5-Air"])
    assert not of("GLM-4.5-Air", "attention_bias").qkv_bias
    granite = of("granite-3.3-8b-instruct", "attention_multiplier", "logits_scaling", "num_key_value_heads")
    assert (granite.attention_scale, granite.multipliers.logits, granite.num_kv_heads) == (1.0, 1.0, 32)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("granite-3.3-8b-instruct", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("Mistral-7B-Instruct-v0.3", {"sliding_window": 0}, "sliding_window is 0"),
        ("Mistral-7B-Instruct-v0.3", {"layer_types": ["sliding_attention"] * 32}, "layer_types is"),
        ("Qwen2.5-7B-Instruct", {"layer_types": ["sliding_attention"] * 28}, "layer_types is"),
        ("Qwen2.5-7B-Instruct", {"use_sliding_window": True, "layer_types": ["chunked"] * 28}, "layer_types is"),
        ("Qwen2.5-7B-Instruct", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
        ("SmolLM3-3B", {"use_sliding_window": True, "sliding_window": 512}, "use_sliding_window is True"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]"),
        ("SmolLM3-3B", {"no_rope_layers": [2] * 36}, "no_rope_layers is [2, 2"),
        ("SmolLM3-3B", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("phi-4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ("phi-4", {"partial_rotary_factor": 0.006}, "partial_rotary_factor is 0.006"),
        ("phi-4", {"rope_scaling": {"type": "longrope"}}, "rope_scaling: short_factor is missing"),
        ("phi-4", {"rope_scaling": {"type": "su"}}, "rope_scaling: type is 'su'"),
        ("Phi-4-mini-instruct", {"partial_rotary_factor": 0.5}, "rope_scaling: short_factor is [1.0"),
        (
            "Phi-4-mini-instruct",
            {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}},
            "config.json: partial_rotary_factor is 0.75",
        ),
        ("Mistral-7B-Instruct-v0.3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("Mistral-7B-Instruct-v0.3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling: type is 'longrope'"),
        ("granite-3.3-8b-instruct", {"embedding_multiplier": "12"}, "embedding_multiplier is '12'"),
        ("granite-3.3-8b-instruct", {"attention_bias": True}, "attention_bias is True"),
        ("Qwen2.5-7B-Instruct", {"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
        (
            "Qwen1.5-MoE-A2.7B-Chat",
            {"shared_expert_intermediate_size": None},
            "shared_expert_intermediate_size is missing",
        ),
        ("Qwen1.5-MoE-A2.7B-Chat", {"qkv_bias": "yes"}, "qkv_bias is 'yes'"),
        ("Qwen1.5-MoE-A2.7B-Chat", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("GLM-4.5-Air", {"n_group": 3}, "n_group is 3"),
        ("GLM-4.5-Air", {"n_group": 128}, "n_group is 128"),
        (
            "GLM-4.5-Air",
            {"n_group": 32, "topk_group": 1},
            "topk_group is 1; accepted: 2 to n_group (32), with 4 experts",
        ),
        ("GLM-4.5-Air", {"n_group": 2, "topk_group": 3}, "topk_group is 3"),
        ("GLM-4.5-Air", {"mlp_bias": True}, "mlp_bias is True"),
        ("granite-3.1-3b-a800m-instruct", {"num_experts_per_tok": 41}, "num_experts_per_tok is 41"),
        ("granite-3.3-8b-instruct", {"no_rope_layers": [1] * 40}, "no_rope_layers is [1, 1"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name: str, change: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        ModelConfig.from_hf(FILES[name] | change)
    assert "accepted:" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "window", "layers"),
    [
        ("Mistral-7B-Instruct-v0.3", {"sliding_window": 4096}, 4096, range(32)),  # as v0.1 has it
        ("Mistral-7B-Instruct-v0.3", {"sliding_window": 32768}, None, ()),  # no sequence is longer
        ("Mixtral-8x7B-Instruct-v0.1", {"sliding_window": 4096}, 4096, range(32)),
        ("phi-4", {"sliding_window": 2047}, 2047, range(40)),
        ("Phi-4-mini-instruct", {"sliding_window": 262144}, None, ()),
        ("Qwen2.5-7B-Instruct", {"sliding_window": 4096}, None, ()),
        ("Qwen2.5-7B-Instruct", {"use_sliding_window": True, "sliding_window": 4096}, 4096, ()),
        (
            "Qwen2.5-7B-Instruct",
            {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 20},
            512,
            range(20, 28),
        ),
        (
            "Qwen2.5-7B-Instruct",
            {
                "use_sliding_window": True,
                "sliding_window": 512,
                "layer_types": ["sliding_attention", *["full_attention"] * 27],
            },
            512,
            (0,),
        ),
    ],
)
def test_windows_are_in_the_layers_that_have_them_in_transformers(
    name: str, change: dict[str, object], window: int | None, layers: Iterable[int]
) -> None:
    config = ModelConfig.from_hf(FILES[name] | change)
    assert (config.window, config.windowed_layers) == (window, frozenset(layers))
    assert {layer for layer in range(config.num_layers) if config.window_of(layer) == window} >= set(layers)
    assert config.kept_tokens == (window if len(config.windowed_layers) == config.num_layers else None)


def test_a_window_that_is_left_out_is_4096_where_that_is_the_default() -> None:
    without = {key: value for key, value in FILES["Mistral-7B-Instruct-v0.3"].items() if key != "sliding_window"}
    assert ModelConfig.from_hf(without).window_of(0) == 4096
    without = {key: value for key, value in FILES["Mixtral-8x7B-Instruct-v0.1"].items() if key != "sliding_window"}
    assert ModelConfig.from_hf(without).window_of(0) is None


@pytest.mark.parametrize(
    ("model_type", "reason"), [("deepseek_v2", r"latent attention \(MLA\)"), ("glm4", "queries and keys are rotated")]
)
def test_a_family_that_no_entry_can_describe_is_refused_with_the_reason(
    tmp_path: Path, model_type: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(CheckpointError, match=rf"model_type is '{model_type}', whose {reason}.*; accepted: llama"):
        read_config(tmp_path)
    assert not REFUSED.keys() & {*DECODERS, *ENCODERS}


def test_every_family_is_made_for_the_tests() -> None:
    assert FAMILY_DEFAULTS.keys() == DECODERS.keys()
