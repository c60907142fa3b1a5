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
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_TINY: Mapping[str, object] = {
    **dict(zip(_SHAPE, (32, 48, 2, 2, 1), strict=True)),
    "vocab_size": 320,
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


def _published(name: str, shape: tuple[int, ...], num_trials: int = 1, **more: object) -> GpuModel:
    """Dense unless `more` says otherwise."""
    config = {**_PUBLISHED, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    return GpuModel(name, config | dict(zip(_SHAPE, shape, strict=True)) | more, 151_669, num_trials)


MODELS: Mapping[str, GpuModel] = {
    model.name: model
    for model in (
        _published("Qwen3-0.6B", (1024, 3072, 28, 16, 8), num_trials=3, tie_word_embeddings=True),
        _published("Qwen3-8B", (4096, 12_288, 36, 32, 8), tie_word_embeddings=False),
        _published(
            "Qwen3-30B-A3B",
            (2048, 6144, 48, 32, 4),
            model_type="qwen3_moe",
            architectures=["Qwen3MoeForCausalLM"],
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
