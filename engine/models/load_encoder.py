"""Builds an encoder from a checkpoint's tensors, by Hugging Face's names; refuses missing, extra and misshapen ones."""

from __future__ import annotations

import torch

from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.weights import Checkpoint
from engine.models.classifier import ClassificationHead
from engine.models.encoder import Affine, EncoderLayer, EncoderModel, GeluForm, LayerNorm
from engine.models.placement import SHAPES_ONLY, ModelPlacement
from engine.models.tensor_source import ShapeSource, TensorSource, head_weight

_GELU_FORMS: dict[str, GeluForm | None] = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "relu": None,
}


def load_encoder(config: EncoderConfig, checkpoint: Checkpoint, placement: ModelPlacement) -> EncoderModel:
    """Load the weights, named with or without `bert.`. The pooler and the heads of pre-training are left out; where
    config.json says that there is a head of classes, it is loaded with all that belongs to it.

    Raises CheckpointError naming a missing, extra or misshapen tensor.
    """
    return _fill_encoder(config, TensorSource(checkpoint, placement.device, placement.dtype), placement)


def check_encoder(config: EncoderConfig, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for the names, shapes and dtypes that `load_encoder` would refuse; no weight is read."""
    _fill_encoder(config, ShapeSource(checkpoint), SHAPES_ONLY)


def _fill_encoder(config: EncoderConfig, source: TensorSource, placement: ModelPlacement) -> EncoderModel:
    family = config.family
    root = family.root if source.has(f"{family.root}embeddings.word_embeddings.weight") else ""
    classifier = None if config.classifier is None else _encoder_head(config, source, placement)
    source.leave_out(*family.left_out)
    source.leave_out(f"{root}pooler.")
    source.leave_out(f"{root}embeddings.position_ids")  # 0, 1, 2, ... in int64, saved by transformers before 4.31
    hidden = config.hidden_size
    words = source.take(f"{root}embeddings.word_embeddings.weight", (config.vocab_size, hidden))
    places = source.take(f"{root}embeddings.position_embeddings.weight", (config.max_position_embeddings, hidden))
    types = source.take(f"{root}embeddings.token_type_embeddings.weight", (config.num_token_types, hidden))
    # Pairs are for heads alone; in a model with one segment both texts are of it.
    segments = types[: 1 if classifier is None else 2]
    model = EncoderModel(
        config=config,
        word_embeddings=words,
        position_embeddings=torch.cat([places + segment for segment in segments]),
        classifier=classifier,
        embedding_norm=_norm(config, source, f"{root}embeddings.LayerNorm"),
        layers=tuple(
            _encoder_layer(config, source, placement, f"{root}encoder.layer.{index}")
            for index in range(config.num_layers)
        ),
    )
    source.finish()
    return model


def _encoder_layer(config: EncoderConfig, source: TensorSource, placement: ModelPlacement, prefix: str) -> EncoderLayer:
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


def _encoder_head(config: EncoderConfig, source: TensorSource, placement: ModelPlacement) -> ClassificationHead:
    """The head of classes: a dense layer with tanh (BERT's pooler) and the classes."""
    hidden, (dense, classes) = config.hidden_size, config.family.head
    num_classes = 0 if config.classifier is None else len(config.classifier.labels)
    return ClassificationHead(
        ops=placement.ops,
        classes=head_weight(source, placement, classes, (num_classes, hidden)),
        bias=source.take(f"{classes}.bias", (num_classes,)).float(),
        dense=(
            head_weight(source, placement, dense, (hidden, hidden)),
            source.take(f"{dense}.bias", (hidden,)).float(),
        ),
    )


def _affine(source: TensorSource, placement: ModelPlacement, names: list[str], shape: tuple[int, int]) -> Affine:
    """Affine layers of one input and shape, stacked to one."""
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
