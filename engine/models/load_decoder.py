"""From a checkpoint to a model: the names of Hugging Face's layout, and where the families differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from engine.checkpoint.body_alone import is_body_alone
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.moe_config import MoeConfig
from engine.checkpoint.rope_table import rope_cos_sin
from engine.models.attention_layer import AttentionLayer
from engine.models.decoder_layer import DecoderLayer
from engine.models.decoder_model import DecoderModel
from engine.models.dense_mlp import DenseMLP
from engine.models.model_placement import ModelPlacement
from engine.models.moe_mlp import MoeMLP
from engine.models.shape_source import ShapeSource
from engine.models.shapes_only import SHAPES_ONLY
from engine.models.streamed_layers import StreamedLayers
from engine.models.tensor_source import TensorSource


def load_decoder(config: ModelConfig, checkpoint: Checkpoint, placement: ModelPlacement) -> DecoderModel:
    """Load the weights. Raises CheckpointError naming a missing, extra or misshapen tensor."""
    source = TensorSource(checkpoint, placement.device, placement.dtype)
    model = _load(config, source, placement, is_body=is_body_alone(checkpoint.names()))
    return replace(model, weights_digest=source.digest())


def check_decoder(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for the names, shapes and dtypes that `load_decoder` would refuse; no weight is read.

    Whether a head that is stored beside the embedding it is tied to equals it, only `load_decoder` finds out.
    """
    _load(config, ShapeSource(checkpoint), SHAPES_ONLY, is_body=is_body_alone(checkpoint.names()))


def stream_decoder(config: ModelConfig, checkpoint: Checkpoint, placement: ModelPlacement) -> DecoderModel:
    """A model for one forward pass, of which one layer at a time is in memory. The checkpoint must stay open for it.

    Its `weights_digest` is of what is read here, no layer. Raises CheckpointError, and so does the pass.
    """
    source = TensorSource(checkpoint, placement.device, placement.dtype)
    return _stream(config, source, placement, is_body=is_body_alone(checkpoint.names()))


def _load(config: ModelConfig, source: TensorSource, placement: ModelPlacement, *, is_body: bool) -> DecoderModel:
    streamed = _stream(config, source, placement, is_body=is_body)
    model = replace(streamed, layers=tuple(streamed.layers))
    source.finish()
    return model


def _stream(config: ModelConfig, source: TensorSource, placement: ModelPlacement, *, is_body: bool) -> DecoderModel:
    root = "" if is_body else "model."
    vocabulary = (config.vocab_size, config.hidden_size)
    embed_tokens = source.take(f"{root}embed_tokens.weight", vocabulary)
    cos_sin = rope_cos_sin(config.rope, config.head_dim, placement.max_positions).to(placement.device)
    layers = StreamedLayers(partial(_layer, config, source, placement, cos_sin, root), config.num_layers)
    final_norm = source.take(f"{root}norm.weight", (config.hidden_size,))
    lm_head = None if is_body else placement.ops.pack(_head(config, source, embed_tokens))
    return DecoderModel(config, placement.ops, embed_tokens, layers, final_norm, lm_head, source.digest())


def _head(config: ModelConfig, source: TensorSource, embed_tokens: torch.Tensor) -> torch.Tensor:
    if not config.tie_word_embeddings:
        return source.take("lm_head.weight", (config.vocab_size, config.hidden_size))
    source.drop_equal("lm_head.weight", embed_tokens)
    return embed_tokens


def _layer(
    config: ModelConfig, source: TensorSource, placement: ModelPlacement, cos_sin: torch.Tensor, root: str, index: int
) -> DecoderLayer:
    prefix = f"{root}layers.{index}"
    norm = (config.hidden_size,)
    mlp: DenseMLP | MoeMLP
    if config.moe is not None and config.is_moe_layer(index):
        mlp = _moe(config, config.moe, source, placement, prefix)
    else:
        mlp = _dense(config, source, placement, prefix)
    return DecoderLayer(
        ops=placement.ops,
        input_norm=source.take(f"{prefix}.input_layernorm.weight", norm),
        attention=_attention(config, source, placement, prefix, cos_sin),
        post_attention_norm=source.take(f"{prefix}.post_attention_layernorm.weight", norm),
        mlp=mlp,
        eps=config.rms_norm_eps,
    )


def _attention(
    config: ModelConfig, source: TensorSource, placement: ModelPlacement, prefix: str, cos_sin: torch.Tensor
) -> AttentionLayer:
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    pack = placement.ops.pack
    qk_norm = None
    if config.qk_norm:
        q_weight = source.take(f"{prefix}.self_attn.q_norm.weight", (config.head_dim,))
        k_weight = source.take(f"{prefix}.self_attn.k_norm.weight", (config.head_dim,))
        qk_norm = (q_weight, k_weight, config.rms_norm_eps)
    return AttentionLayer(
        ops=placement.ops,
        qkv_proj=pack(
            source.take_fused(
                [f"{prefix}.self_attn.{part}_proj.weight" for part in "qkv"],
                [(rows, config.hidden_size) for rows in (q_rows, kv_rows, kv_rows)],
            )
        ),
        o_proj=pack(source.take(f"{prefix}.self_attn.o_proj.weight", (config.hidden_size, q_rows))),
        qk_norm=qk_norm,
        cos_sin=cos_sin,
        head_dim=config.head_dim,
    )


def _dense(config: ModelConfig, source: TensorSource, placement: ModelPlacement, prefix: str) -> DenseMLP:
    hidden, inner = config.hidden_size, config.intermediate_size
    pack = placement.ops.pack
    return DenseMLP(
        ops=placement.ops,
        gate_up_proj=pack(
            source.take_fused([f"{prefix}.mlp.{part}_proj.weight" for part in ("gate", "up")], [(inner, hidden)] * 2)
        ),
        down_proj=pack(source.take(f"{prefix}.mlp.down_proj.weight", (hidden, inner))),
    )


def _moe(config: ModelConfig, moe: MoeConfig, source: TensorSource, placement: ModelPlacement, prefix: str) -> MoeMLP:
    hidden, inner = config.hidden_size, moe.intermediate_size
    pack = placement.ops.pack
    experts = [f"{prefix}.mlp.experts.{expert}" for expert in range(moe.num_experts)]
    return MoeMLP(
        ops=placement.ops,
        router=pack(source.take(f"{prefix}.mlp.gate.weight", (moe.num_experts, hidden)), keep_dtype=True),
        gate_up_proj=pack(
            source.take_experts(
                [[f"{expert}.{part}_proj.weight" for part in ("gate", "up")] for expert in experts],
                [(inner, hidden)] * 2,
            )
        ),
        down_proj=pack(source.take_experts([[f"{expert}.down_proj.weight"] for expert in experts], [(hidden, inner)])),
        top_k=moe.experts_per_token,
        renormalise=moe.norm_topk_prob,
        bucketed_min_tokens=placement.bucketed_min_tokens,
    )
