"""What the tiny checkpoint of each family has in its config.json, beside what all of them have."""

from __future__ import annotations

from typing import Any, Literal

Family = Literal[
    "qwen3",
    "qwen3_moe",
    "llama",
    "qwen2",
    "qwen2_moe",
    "mistral",
    "mixtral",
    "phi3",
    "smollm3",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "olmo2",
    "glm4_moe",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
]

MOE_DEFAULTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
MILLION = {"rope_type": "default", "rope_theta": 1000000.0}
GRANITE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.7,
}
ALTERNATING = {"sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"] * 2}
# What each family's configuration has beside DEFAULTS.
FAMILY_DEFAULTS: dict[Family, dict[str, Any]] = {
    "qwen3": {"rope_parameters": MILLION},
    "qwen3_moe": {"rope_parameters": MILLION, **MOE_DEFAULTS},
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
    "qwen2": {"rope_parameters": MILLION},
    "qwen2_moe": {"rope_parameters": MILLION, **MOE_DEFAULTS, "shared_expert_intermediate_size": 160},
    "mistral": {"rope_parameters": MILLION, "sliding_window": None},
    "mixtral": {"rope_parameters": MILLION, "num_local_experts": 8, "num_experts_per_tok": 2},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "pad_token_id": 0},
    "smollm3": {"rope_parameters": MILLION, "no_rope_layers": [1, 0, 1, 0], "pad_token_id": 0},
    "granite": GRANITE,
    "granitemoe": {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2},
    "granitemoeshared": {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    "glm4_moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
    },
    "olmo2": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "pad_token_id": 0},
    "olmo3": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.2,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "pad_token_id": 0,
        **ALTERNATING,
    },
    # Caps low enough to bend most scores, and a scale that is not the head's.
    "gemma2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 24,
        **ALTERNATING,
    },
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 2.0,  # low enough to clamp some
        **ALTERNATING,
    },
    "gemma3_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "query_pre_attn_scalar": 24,
        **ALTERNATING,
    },
}
