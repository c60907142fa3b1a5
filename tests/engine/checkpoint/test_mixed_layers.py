"""What families say in config.json whose layers are of two kinds: Gemma 2 and 3, OLMo 3, by their published files."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope import LinearScaling, RopeConfig, YarnScaling
from engine.errors import CheckpointError

GEMMA: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "cache_implementation": "hybrid",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
FILES: dict[str, dict[str, Any]] = {
    "gemma-2-9b-it": GEMMA
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "vocab_size": 256000,
    },
    "gemma-3-1b-it": GEMMA
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "Olmo-3-7B-Instruct": {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 100278,
    },
}


def of(name: str, *left_out: str, **changed: object) -> ModelConfig:
    return ModelConfig.from_hf({key: value for key, value in (FILES[name] | changed).items() if key not in left_out})


def test_gemma_2_is_read() -> None:
    config = of("gemma-2-9b-it")
    assert (config.attention_cap, config.logits_cap, config.attention_scale) == (50.0, 30.0, 1 / 16)
    assert config.windowed_layers == frozenset(range(0, 42, 2))
    assert (config.window, config.local_rope, config.local_layers) == (4096, None, frozenset())
    assert (config.plus_one_norms, config.activation, config.tie_word_embeddings) == (True, "gelu_tanh", True)
    assert (config.multipliers.embedding, config.multipliers.rounds_embedding) == (3584**0.5, True)
    assert None not in (config.norms.after_attention, config.norms.after_mlp, config.norms.before_mlp)
    assert not config.qk_norm


def test_gemma_3_is_read() -> None:
    config = of("gemma-3-1b-it")
    assert (config.attention_cap, config.logits_cap, config.qk_norm, config.num_kv_heads) == (None, None, True, 1)
    assert config.windowed_layers == frozenset(layer for layer in range(26) if layer % 6 != 5)
    assert config.rope == RopeConfig(theta=1e6, scaling=None, num_rotated=256)
    assert config.local_rope == RopeConfig(theta=1e4, scaling=None, num_rotated=256)
    assert config.local_layers == config.windowed_layers
    scaled = of("gemma-3-1b-it", rope_scaling={"factor": 8.0, "rope_type": "linear"})  # as 4b and larger have it
    assert (scaled.rope.scaling, scaled.local_rope) == (LinearScaling(8.0), config.local_rope)
    assert of("gemma-3-1b-it", "sliding_window_pattern", "rope_local_base_freq", "rope_theta") == config
    newer = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert of("gemma-3-1b-it", "rope_theta", "rope_scaling", "rope_local_base_freq", rope_parameters=newer) == scaled


def test_olmo_3_is_read() -> None:
    config = of("Olmo-3-7B-Instruct")
    assert isinstance(config.rope.scaling, YarnScaling)
    assert (config.rope.theta, config.rope.scaling.factor) == (5e5, 8.0)
    assert config.local_rope == RopeConfig(theta=5e5, scaling=None, num_rotated=128)
    assert config.windowed_layers == frozenset(layer for layer in range(32) if layer % 4 != 3)
    assert (config.wide_qk_norm, config.norms.before_attention, config.activation) == (True, None, "silu")
    assert of("Olmo-3-7B-Instruct", "layer_types") == config


def test_layers_keep_their_rope_where_the_window_holds_every_sequence() -> None:
    config = of("gemma-3-1b-it", sliding_window=32768)
    assert (config.window, config.windowed_layers) == (None, frozenset())
    assert config.local_layers == of("gemma-3-1b-it").local_layers


def test_a_cap_that_is_null_is_none_and_one_that_is_left_out_the_familys() -> None:
    assert of("gemma-2-9b-it", attn_logit_softcapping=None).attention_cap is None
    assert of("gemma-2-9b-it", "attn_logit_softcapping").attention_cap == 50.0
    assert of("gemma-3-1b-it", "final_logit_softcapping").logits_cap is None


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("gemma-2-9b-it", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
        ("gemma-2-9b-it", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("gemma-2-9b-it", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("gemma-2-9b-it", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma-2-9b-it", {"layer_types": ["sliding_attention"]}, "layer_types is"),
        ("gemma-2-9b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma-3-1b-it", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("gemma-3-1b-it", {"rope_local_base_freq": -1}, "rope_local_base_freq is -1"),
        ("gemma-3-1b-it", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters is"),
        ("gemma-3-1b-it", {"rope_parameters": {"full_attention": {}, "other": {}}}, "other is"),
        ("gemma-3-1b-it", {"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures is"),
        ("Olmo-3-7B-Instruct", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0"),
        ("Olmo-3-7B-Instruct", {"rope_scaling": {"rope_type": "su"}}, "rope_scaling: rope_type is 'su'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name: str, change: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        of(name, **change)
    assert "accepted:" in str(caught.value)
