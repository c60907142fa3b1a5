"""Builds an encoder from a checkpoint's tensors, by Hugging Face's names; refuses missing, extra and misshapen ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.rope import rope_cos_sin
from engine.checkpoint.weights import Checkpoint
from engine.models.classifier import ClassificationHead, Elementwise
from engine.models.encoder import Affine, EncoderLayer, EncoderModel, LayerNorm
from engine.models.placement import SHAPES_ONLY, ModelPlacement
from engine.models.tensor_source import ShapeSource, TensorSource, head_weight

_GELU_TANH = partial(torch.nn.functional.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Elementwise] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
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
    family, names = config.family, config.family.names
    root = family.root if source.has(f"{family.root}{names.words}.weight") else ""
    classifier = None if config.classifier is None else _encoder_head(config, source, placement)
    source.leave_out(*family.left_out)
    source.leave_out(f"{root}pooler.")
    source.leave_out(f"{root}embeddings.position_ids")  # 0, 1, 2, ... in int64, saved by transformers before 4.31
    layers = _EncoderLayers(config, source, placement)
    model = EncoderModel(
        config=config,
        word_embeddings=source.take(f"{root}{names.words}.weight", (config.vocab_size, config.hidden_size)),
        position_embeddings=_positions(config, source, root, takes_pairs=classifier is not None),
        classifier=classifier,
        embedding_norm=_norm(config, source, f"{root}{names.embedding_norm}"),
        layers=tuple(layers.load(f"{root}{names.layer}.{index}", index) for index in range(config.num_layers)),
        rotations=_rotations(config, placement),
        final_norm=None if names.final_norm is None else _norm(config, source, f"{root}{names.final_norm}"),
    )
    source.finish()
    source.release()
    return model


def _positions(config: EncoderConfig, source: TensorSource, root: str, *, takes_pairs: bool) -> torch.Tensor | None:
    names, hidden = config.family.names, config.hidden_size
    segments = None
    if names.types is not None:
        types = source.take(f"{root}{names.types}.weight", (config.num_token_types, hidden))
        # Pairs are for heads alone; in a model with one segment both texts are of it.
        segments = types[: 2 if takes_pairs else 1]
    if names.positions is None or segments is None:
        return segments
    places = source.take(f"{root}{names.positions}.weight", (config.max_position_embeddings, hidden))
    return torch.cat([places + segment for segment in segments])


def _rotations(config: EncoderConfig, placement: ModelPlacement) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One table where layers that see less have no other rope."""
    if config.rotary is None:
        return None
    head_dim = config.hidden_size // config.num_heads
    full, local = (
        rope_cos_sin(rope, head_dim, config.max_position_embeddings).to(placement.device)
        for rope in (config.rotary.full, config.rotary.local)
    )
    return full, (full if config.rotary.full == config.rotary.local else local)


@dataclass(frozen=True, eq=False)
class _EncoderLayers:
    """Loads the layers of an encoder, each by itself."""

    config: EncoderConfig
    source: TensorSource
    placement: ModelPlacement

    def load(self, prefix: str, index: int) -> EncoderLayer:
        config, family, names, biases = self.config, self.config.family, self.config.family.names, self.config.biases
        hidden, inner = config.hidden_size, config.intermediate_size
        is_local = config.rotary is not None and index in config.rotary.local_layers
        # The first layer's input has been normed with the embedding.
        has_attention_norm = not family.norms_first or index > 0
        return EncoderLayer(
            qkv_proj=self._affine(prefix, names.qkv, (3 * hidden, hidden), has_bias=biases.attention),
            o_proj=self._affine(prefix, (names.output,), (hidden, hidden), has_bias=biases.attention),
            attention_norm=(
                _norm(config, self.source, f"{prefix}.{names.attention_norm}") if has_attention_norm else None
            ),
            up_proj=self._affine(
                prefix, names.up, (2 * inner if family.is_gated else inner, hidden), has_bias=biases.mlp
            ),
            down_proj=self._affine(prefix, (names.down,), (hidden, inner), has_bias=biases.mlp),
            mlp_norm=_norm(config, self.source, f"{prefix}.{names.mlp_norm}"),
            num_heads=config.num_heads,
            activation=_ACTIVATIONS[config.activation],
            norms_first=family.norms_first,
            is_gated=family.is_gated,
            reach=config.rotary.reach if is_local and config.rotary is not None else None,
        )

    def _affine(self, prefix: str, parts: tuple[str, ...], shape: tuple[int, int], *, has_bias: bool) -> Affine:
        """Affine layers of one input, stacked to one of this shape."""
        source, rows = self.source, shape[0] // len(parts)
        names = [f"{prefix}.{part}" for part in parts]
        weight = source.take_fused([f"{name}.weight" for name in names], [(rows, shape[1])] * len(names))
        bias = source.take_fused([f"{name}.bias" for name in names], [(rows,)] * len(names)) if has_bias else None
        return Affine(self.placement.ops, self.placement.ops.pack(weight), bias)


def _encoder_head(config: EncoderConfig, source: TensorSource, placement: ModelPlacement) -> ClassificationHead:
    """The head of classes: a dense layer with an activation (BERT's pooler), perhaps a norm, and the classes."""
    hidden, family = config.hidden_size, config.family
    dense, classes = family.head
    num_classes = 0 if config.classifier is None else len(config.classifier.labels)
    norm = None if family.head_norm is None else _norm(config, source, family.head_norm)
    if norm is not None:
        norm = replace(norm, weight=norm.weight.float(), bias=None if norm.bias is None else norm.bias.float())
    return ClassificationHead(
        ops=placement.ops,
        classes=head_weight(source, placement, classes, (num_classes, hidden)),
        bias=source.take(f"{classes}.bias", (num_classes,)).float(),
        dense=(
            head_weight(source, placement, dense, (hidden, hidden)),
            source.take(f"{dense}.bias", (hidden,)).float() if config.biases.head else None,
        ),
        activation=_ACTIVATIONS[config.head_activation],
        norm=norm,
    )


def _norm(config: EncoderConfig, source: TensorSource, prefix: str) -> LayerNorm:
    """Checkpoints that came from TensorFlow call weight and bias gamma and beta."""
    weight, bias = ("gamma", "beta") if source.has(f"{prefix}.gamma") else ("weight", "bias")
    shape = (config.hidden_size,)
    scale = source.take(f"{prefix}.{weight}", shape)
    shift = source.take(f"{prefix}.{bias}", shape) if config.biases.norms else None
    return LayerNorm(scale, shift, config.layer_norm_eps)
