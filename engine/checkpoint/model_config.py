"""What config.json says about a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from engine.checkpoint.common_config import DtypeName, refuse_unsupported, weights_dtype
from engine.checkpoint.config_reader import ConfigReader
from engine.checkpoint.moe_config import MoeConfig
from engine.checkpoint.rope_config import RopeConfig

Architecture = Literal["llama", "qwen3", "qwen3_moe"]

# model_type -> the class in config.json's `architectures` that generates; the other one that is accepted is its body
# alone (Qwen3Model), of which embeddings are made
MODEL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
MUST_BE_FALSE = ("attention_bias", "mlp_bias", "use_sliding_window", "add_cross_attention", "is_encoder_decoder")
MUST_BE_ABSENT = {
    "quantization_config": "null: quantised weights are not supported",
    "compression_config": "null: compressed weights are not supported",
    "auto_map": "null: code from a checkpoint is never run",
    # What other families' attention or residual stream does, found in files that call themselves by these names.
    **dict.fromkeys(
        (
            "attention_chunk_size",
            "attention_multiplier",
            "attn_logit_softcapping",
            "embedding_multiplier",
            "final_logit_softcapping",
            "logits_scaling",
            "no_rope_layers",
            "qk_layernorm",
            "residual_multiplier",
        ),
        "null: not part of this architecture here",
    ),
}
QWEN3_HEAD_DIM = 128  # Qwen3's value where config.json names none; the other families divide


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder: everything about the model that is not in its tensors."""

    architecture: Architecture
    vocab_size: int  # rows of the embedding; the tokenizer may know fewer ids
    hidden_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of a dense MLP
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    qk_norm: bool  # RMSNorm over each query and key head
    moe: MoeConfig | None
    dtype: DtypeName  # of the weights on disk

    @classmethod
    def from_hf(cls, data: Mapping[str, object]) -> ModelConfig:
        """Check and translate the content of a config.json. Raises CheckpointError naming the key."""
        config = ConfigReader(data, "config.json")
        architecture = _architecture(config)
        _refuse_what_is_not_supported(config)
        num_layers = config.integer("num_hidden_layers")
        _check_layer_types(config, num_layers)
        num_heads = config.integer("num_attention_heads")
        num_kv_heads = _num_kv_heads(config, architecture, num_heads)
        max_position_embeddings = config.integer("max_position_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=config.integer("hidden_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, architecture, num_heads),
            intermediate_size=config.integer("intermediate_size"),
            rms_norm_eps=config.number("rms_norm_eps"),
            rope=RopeConfig.from_reader(config, max_position_embeddings),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
            qk_norm=architecture != "llama",
            moe=MoeConfig.from_reader(config, num_layers) if architecture == "qwen3_moe" else None,
            dtype=weights_dtype(config),
        )

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has experts rather than a dense MLP."""
        return self.moe is not None and layer in self.moe.sparse_layers


def _architecture(config: ConfigReader) -> Architecture:
    model_type = config.choice("model_type", tuple(MODEL_CLASSES))
    wanted = MODEL_CLASSES[model_type]
    classes = config.data.get("architectures")
    body = wanted.replace("ForCausalLM", "Model")
    if classes is not None and classes not in ([wanted], [body]):
        raise config.refuse("architectures", classes, f'["{wanted}"] or ["{body}"] for model_type {model_type!r}')
    return cast(Architecture, model_type)


def _refuse_what_is_not_supported(config: ConfigReader) -> None:
    refuse_unsupported(config, absent=MUST_BE_ABSENT, false=MUST_BE_FALSE)
    if config.has("sliding_window") and config.data["model_type"] == "llama":
        raise config.refuse("sliding_window", config.data["sliding_window"], "null")  # Qwen3 has a switch beside it
    config.choice("hidden_act", ("silu",), default="silu")


def _check_layer_types(config: ConfigReader, num_layers: int) -> None:
    """`sliding_window` alone is not in use; a layer type that asks for it is."""
    layer_types = config.data.get("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * num_layers:
        raise config.refuse("layer_types", layer_types, f'"full_attention" for each of {num_layers} layers')


def _num_kv_heads(config: ConfigReader, architecture: Architecture, num_heads: int) -> int:
    # Llama 2 files leave the key out. transformers gives Qwen3 files without it 32 or 4 heads, whatever the model:
    # there it must be named, or be null for one KV head a query head.
    explicit_null = "num_key_value_heads" in config.data
    default = num_heads if architecture == "llama" or explicit_null else None
    num_kv_heads = config.integer("num_key_value_heads", default=default)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    return num_kv_heads


def _head_dim(config: ConfigReader, architecture: Architecture, num_heads: int) -> int:
    hidden_size = config.integer("hidden_size")
    if config.has("head_dim"):
        head_dim = config.integer("head_dim")
    elif architecture == "qwen3":
        head_dim = QWEN3_HEAD_DIM
    elif hidden_size % num_heads:
        raise config.refuse("hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads})")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise config.refuse("head_dim", head_dim, "an even number: rotary embedding turns pairs")
    return head_dim
