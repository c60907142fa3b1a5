"""The models that are measured: the published shapes, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.checkpoint.model_config import ModelConfig

_PUBLISHED: Mapping[str, object] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "dtype": "bfloat16",
}
_TINY: Mapping[str, object] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}


@dataclass(frozen=True)
class GpuModel:
    """One model."""

    name: str
    config: Mapping[str, object]  # of config.json, in Hugging Face's names
    tokenizer_size: int  # tokens; the embedding's further rows mean nothing
    num_trials: int = 1  # timed runs of the nano-vllm workload

    @property
    def parsed(self) -> ModelConfig:
        """As the engine reads it."""
        return ModelConfig.from_hf(self.config)

    def tiny(self) -> GpuModel:
        """The same kind, to try the script with: no figure of it means anything."""
        config = {**self.config, **_TINY}
        if "num_experts" in config:
            config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return GpuModel(self.name, config, 300)


def _dense(name: str, num_trials: int, **shape: object) -> GpuModel:
    config = {**_PUBLISHED, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **shape}
    return GpuModel(name, config, 151_669, num_trials)


MODELS: Mapping[str, GpuModel] = {
    model.name: model
    for model in (
        _dense(
            "Qwen3-0.6B",
            3,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        ),
        _dense(
            "Qwen3-8B",
            1,
            hidden_size=4096,
            intermediate_size=12_288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        ),
        _dense(
            "Qwen3-30B-A3B",
            1,
            model_type="qwen3_moe",
            architectures=["Qwen3MoeForCausalLM"],
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            tie_word_embeddings=False,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
    )
}
