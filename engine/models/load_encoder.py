"""From a checkpoint to an encoder: the names of Hugging Face's BERT."""

from __future__ import annotations

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.encoder_config import EncoderConfig
from engine.models.affine import Affine
from engine.models.encoder_layer import EncoderLayer, GeluForm
from engine.models.encoder_model import EncoderModel
from engine.models.layer_norm import LayerNorm
from engine.models.model_placement import ModelPlacement
from engine.models.shape_source import ShapeSource
from engine.models.shapes_only import SHAPES_ONLY
from engine.models.tensor_source import TensorSource

_GELU_FORMS: dict[str, GeluForm | None] = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "relu": None,
}


def load_encoder(config: EncoderConfig, checkpoint: Checkpoint, placement: ModelPlacement) -> EncoderModel:
    """Load the weights, named with or without `bert.`. The pooler and the heads of pre-training are left out.

    Raises CheckpointError naming a missing, extra or misshapen tensor.
    """
    return _load(config, TensorSource(checkpoint, placement.device, placement.dtype), placement)


def check_encoder(config: EncoderConfig, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for the names, shapes and dtypes that `load_encoder` would refuse; no weight is read."""
    _load(config, ShapeSource(checkpoint), SHAPES_ONLY)


def _load(config: EncoderConfig, source: TensorSource, placement: ModelPlacement) -> EncoderModel:
    root = "bert." if source.has("bert.embeddings.word_embeddings.weight") else ""
    source.leave_out("cls.")
    source.leave_out(f"{root}pooler.")
    source.leave_out(f"{root}embeddings.position_ids")  # 0, 1, 2, ... in int64, saved by transformers before 4.31
    hidden = config.hidden_size
    words = source.take(f"{root}embeddings.word_embeddings.weight", (config.vocab_size, hidden))
    places = source.take(f"{root}embeddings.position_embeddings.weight", (config.max_position_embeddings, hidden))
    types = source.take(f"{root}embeddings.token_type_embeddings.weight", (config.num_token_types, hidden))
    model = EncoderModel(
        config=config,
        word_embeddings=words,
        position_embeddings=places + types[0],
        embedding_norm=_norm(config, source, f"{root}embeddings.LayerNorm"),
        layers=tuple(
            _layer(config, source, placement, f"{root}encoder.layer.{index}") for index in range(config.num_layers)
        ),
    )
    source.finish()
    return model


def _layer(config: EncoderConfig, source: TensorSource, placement: ModelPlacement, prefix: str) -> EncoderLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = [f"{prefix}.attention.self.{part}" for part in ("query", "key", "value")]
    return EncoderLayer(
        qkv_proj=_affine(source, placement, qkv, (hidden, hidden)),
        o_proj=_affine(source, placement, [f"{prefix}.attention.output.dense"], (hidden, hidden)),
        attention_norm=_norm(config, source, f"{prefix}.attention.output.LayerNorm"),
        up_proj=_affine(source, placement, [f"{prefix}.intermediate.dense"], (inner, hidden)),
        down_proj=_affine(source, placement, [f"{prefix}.output.dense"], (hidden, inner)),
        output_norm=_norm(config, source, f"{prefix}.output.LayerNorm"),
        num_heads=config.num_heads,
        gelu=_GELU_FORMS[config.activation],
    )


def _affine(source: TensorSource, placement: ModelPlacement, names: list[str], shape: tuple[int, int]) -> Affine:
    """Several layers of one shape as one."""
    weight = source.take_fused([f"{name}.weight" for name in names], [shape] * len(names))
    bias = source.take_fused([f"{name}.bias" for name in names], [shape[:1]] * len(names))
    return Affine(placement.ops, placement.ops.pack(weight), bias)


def _norm(config: EncoderConfig, source: TensorSource, prefix: str) -> LayerNorm:
    """Checkpoints that came from TensorFlow call weight and bias gamma and beta."""
    weight, bias = ("gamma", "beta") if source.has(f"{prefix}.gamma") else ("weight", "bias")
    shape = (config.hidden_size,)
    return LayerNorm(
        source.take(f"{prefix}.{weight}", shape), source.take(f"{prefix}.{bias}", shape), config.layer_norm_eps
    )
