"""Builds a model from a checkpoint's tensors, by Hugging Face's names; refuses missing, extra and misshapen ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from engine.checkpoint.model_config import EncoderConfig, ModelConfig, MoeConfig
from engine.checkpoint.rope import paired_dimensions, rope_cos_sin, unrotated_cos_sin
from engine.checkpoint.weights import DTYPES, Checkpoint, is_body_alone
from engine.errors import CheckpointError
from engine.models.classifier import ClassificationHead
from engine.models.decoder import (
    AttentionLayer,
    DecoderLayer,
    DecoderModel,
    DenseMLP,
    LayerNorms,
    MoeMLP,
    StreamedLayers,
)
from engine.models.encoder import Affine, EncoderLayer, EncoderModel, GeluForm, LayerNorm
from engine.models.placement import SHAPES_ONLY, ModelPlacement
from engine.models.quantised_weights import in_order, take_experts, take_weight
from kernels.operands import PackedWeight
from kernels.quantised import QuantisedWeight

_GELU_FORMS: dict[str, GeluForm | None] = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "relu": None,
}

SAMPLED_ELEMENTS = 64  # of each tensor
# What files with an 8-bit KV cache have beside its layers: compressed-tensors' names, its older ones and AutoFP8's.
KV_SCALES = ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale", "v_proj.output_scale")


def load_decoder(config: ModelConfig, checkpoint: Checkpoint, placement: ModelPlacement) -> DecoderModel:
    """Load the weights. Raises CheckpointError naming a missing, extra or misshapen tensor."""
    source = TensorSource(checkpoint, placement.device, placement.dtype)
    model = _fill_decoder(config, source, placement, is_body=is_body_alone(checkpoint.names()))
    return replace(model, weights_digest=source.digest())


def check_decoder(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for the names, shapes and dtypes that `load_decoder` would refuse; no weight is read.

    Only `load_decoder` finds out whether a stored head equals the embedding that it is tied to.
    """
    describe_decoder(config, checkpoint)


def describe_decoder(config: ModelConfig, checkpoint: Checkpoint) -> DecoderModel:
    """The model that `load_decoder` would make, its tensors without values. Raises as `check_decoder` does."""
    return _fill_decoder(config, ShapeSource(checkpoint), SHAPES_ONLY, is_body=is_body_alone(checkpoint.names()))


def stream_decoder(config: ModelConfig, checkpoint: Checkpoint, placement: ModelPlacement) -> DecoderModel:
    """A model for one forward pass, with one layer at a time in memory. The checkpoint must stay open until then.

    Its `weights_digest` leaves the layers out. Raises CheckpointError, and so does the pass.
    """
    source = TensorSource(checkpoint, placement.device, placement.dtype)
    return _stream_decoder(config, source, placement, is_body=is_body_alone(checkpoint.names()))


def _fill_decoder(
    config: ModelConfig, source: TensorSource, placement: ModelPlacement, *, is_body: bool
) -> DecoderModel:
    streamed = _stream_decoder(config, source, placement, is_body=is_body)
    model = replace(streamed, layers=tuple(streamed.layers))
    source.finish()
    return model


def _stream_decoder(
    config: ModelConfig, source: TensorSource, placement: ModelPlacement, *, is_body: bool
) -> DecoderModel:
    root = "" if is_body else "model."
    if config.quantization is not None and config.quantization.has_kv_scales:
        prefixes = [f"{root}layers.{index}.self_attn" for index in range(config.num_layers)]
        source.leave_out(*(f"{prefix}.{scale}" for prefix in prefixes for scale in KV_SCALES))
    vocabulary = (config.vocab_size, config.hidden_size)
    embed_tokens = source.take(f"{root}embed_tokens.weight", vocabulary)
    layers = StreamedLayers(_DecoderLayers(config, source, placement, root).load, config.num_layers)
    final_norm = source.take(f"{root}norm.weight", (config.hidden_size,))
    classifier = None if config.classifier is None else _decoder_head(config, source, placement)
    has_lm_head = not is_body and classifier is None
    lm_head = placement.pack(_head(config, source, embed_tokens)) if has_lm_head else None
    return DecoderModel(config, placement.ops, embed_tokens, layers, final_norm, lm_head, source.digest(), classifier)


def _head(config: ModelConfig, source: TensorSource, embed_tokens: torch.Tensor) -> torch.Tensor | QuantisedWeight:
    if not config.tie_word_embeddings:
        return take_weight(source, config.quantization, ["lm_head"], [(config.vocab_size, config.hidden_size)])
    source.drop_equal("lm_head.weight", embed_tokens)
    return embed_tokens


@dataclass(frozen=True, eq=False)
class _DecoderLayers:
    """Loads the layers of a decoder, each by itself."""

    config: ModelConfig
    source: TensorSource
    placement: ModelPlacement
    root: str  # what the layers' names begin with

    @cached_property
    def rotated(self) -> torch.Tensor:
        """The rotary table, of all layers but those of `unrotated`."""
        table = rope_cos_sin(self.config.rope, self.config.head_dim, self.placement.max_positions)
        return table.to(self.placement.device)

    @cached_property
    def unrotated(self) -> torch.Tensor:
        """The table of layers that know no positions, made where there are any."""
        return unrotated_cos_sin(self.config.head_dim, self.placement.max_positions).to(self.placement.device)

    def load(self, index: int) -> DecoderLayer:
        config, source = self.config, self.source
        prefix, norm = f"{self.root}layers.{index}", (config.hidden_size,)
        mlp: DenseMLP | MoeMLP
        if config.moe is not None and config.is_moe_layer(index):
            mlp = self._moe(f"{prefix}.{config.moe.names.module}", config.moe)
        else:
            mlp = self._dense(f"{prefix}.mlp")
        names = config.norms
        places = (names.before_attention, names.after_attention, names.before_mlp, names.after_mlp)
        norms = [None if name is None else source.take(f"{prefix}.{name}.weight", norm) for name in places]
        return DecoderLayer(
            ops=self.placement.ops,
            norms=LayerNorms(*norms),
            attention=self._attention(f"{prefix}.self_attn", index),
            mlp=mlp,
            eps=config.rms_norm_eps,
            residual_multiplier=config.multipliers.residual,
        )

    def _attention(self, prefix: str, index: int) -> AttentionLayer:
        config = self.config
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        widths = (q_rows, kv_rows) if config.wide_qk_norm else (config.head_dim, config.head_dim)
        qk_norm = None
        if config.qk_norm or config.wide_qk_norm:
            names = (f"{prefix}.{part}_norm.weight" for part in "qk")
            q, k = (self.source.take(name, (width,)) for name, width in zip(names, widths, strict=True))
            qk_norm = (q, k, config.rms_norm_eps)
        rows, qkv_bias = (q_rows, kv_rows, kv_rows), None
        if config.qkv_bias:  # before the weights, which may be quantised in a format that has zeros for a bias
            qkv_bias = self.source.take_fused([f"{prefix}.{part}_proj.bias" for part in "qkv"], [(n,) for n in rows])
        return AttentionLayer(
            ops=self.placement.ops,
            qkv_proj=self._projection(prefix, "qkv", rows, config.hidden_size, fused="qkv", order=self.order_of_qkv),
            o_proj=self._projection(prefix, "o", (config.hidden_size,), q_rows),
            qk_norm=None if config.wide_qk_norm else qk_norm,
            wide_qk_norm=qk_norm if config.wide_qk_norm else None,
            cos_sin=self.unrotated if index in config.unrotated_layers else self.rotated,
            scale=config.attention_scale,
            window=config.window_of(index),
            qkv_bias=qkv_bias,
        )

    @cached_property
    def order_of_qkv(self) -> torch.Tensor | None:
        """The rows of queries and keys so that halves of a head are turned together, those of values as they are."""
        config = self.config
        order = paired_dimensions(config.rope, config.head_dim)
        if order is None:
            return None
        num_paired = config.num_heads + config.num_kv_heads
        starts = torch.arange(num_paired)[:, None] * config.head_dim
        values = torch.arange(config.num_kv_heads * config.head_dim) + num_paired * config.head_dim
        return torch.cat(((starts + order).flatten(), values)).to(self.placement.device)

    def _dense(self, prefix: str) -> DenseMLP:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return DenseMLP(
            ops=self.placement.ops,
            gate_up_proj=self._projection(prefix, ("gate", "up"), (inner, inner), hidden, fused="gate_up"),
            down_proj=self._projection(prefix, ("down",), (hidden,), inner),
        )

    def _moe(self, prefix: str, moe: MoeConfig) -> MoeMLP:
        hidden, inner = self.config.hidden_size, moe.intermediate_size
        source, pack = self.source, self.placement.pack
        experts = [f"{prefix}.experts.{expert}" for expert in range(moe.num_experts)]
        gate, up, down_name = moe.names.projections
        gate_up = [[f"{expert}.{part}" for part in (gate, up)] for expert in experts]
        down = [[f"{expert}.{down_name}"] for expert in experts]
        quantization = self.config.quantization
        router = take_weight(source, quantization, [f"{prefix}.gate"], [(moe.num_experts, hidden)])
        return MoeMLP(
            ops=self.placement.ops,
            router=self.placement.ops.pack(router, keep_dtype=True),
            gate_up_proj=pack(take_experts(source, quantization, gate_up, [(inner, hidden)] * 2)),
            down_proj=pack(take_experts(source, quantization, down, [(hidden, inner)])),
            top_k=moe.experts_per_token,
            renormalise=moe.norm_topk_prob,
            bucketed_min_tokens=self.placement.bucketed_min_tokens,
        )

    def _projection(
        self,
        prefix: str,
        parts: Sequence[str],
        rows: Sequence[int],
        width: int,
        *,
        fused: str | None = None,
        order: torch.Tensor | None = None,
    ) -> PackedWeight:
        """Projections of one input, stacked on top of each other. rows: of each; fused: the name of all in one; order:
        of the rows of the whole, None: as they are.
        """
        if self.config.fuses_projections and fused is not None:
            parts, rows = (fused,), (sum(rows),)
        modules = [f"{prefix}.{part}_proj" for part in parts]
        shapes = [(count, width) for count in rows]
        weight = take_weight(self.source, self.config.quantization, modules, shapes)
        return self.placement.pack(weight if order is None else in_order(weight, order))


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


def _decoder_head(config: ModelConfig, source: TensorSource, placement: ModelPlacement) -> ClassificationHead:
    """The head of classes, over the last token's hidden state: transformers' GenericForSequenceClassification."""
    shape = (_num_classes(config), config.hidden_size)
    return ClassificationHead(placement.ops, _head_weight(source, placement, "score", shape))


def _encoder_head(config: EncoderConfig, source: TensorSource, placement: ModelPlacement) -> ClassificationHead:
    """The head of classes: a dense layer with tanh (BERT's pooler) and the classes."""
    hidden, (dense, classes) = config.hidden_size, config.family.head
    return ClassificationHead(
        ops=placement.ops,
        classes=_head_weight(source, placement, classes, (_num_classes(config), hidden)),
        bias=source.take(f"{classes}.bias", (_num_classes(config),)).float(),
        dense=(
            _head_weight(source, placement, dense, (hidden, hidden)),
            source.take(f"{dense}.bias", (hidden,)).float(),
        ),
    )


def _num_classes(config: EncoderConfig | ModelConfig) -> int:
    return 0 if config.classifier is None else len(config.classifier.labels)


def _head_weight(source: TensorSource, placement: ModelPlacement, name: str, shape: tuple[int, int]) -> PackedWeight:
    """In float32 whatever the model's dtype."""
    return placement.ops.pack(source.take(f"{name}.weight", shape).float(), keep_dtype=True)


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


class TensorSource:
    """Hands out each tensor once, in the shape that the model needs; a tensor that nobody took is an error.

    Tensors are memory-mapped. Those that need no conversion and no fusing are used where they lie, the others copied
    one at a time: there is never a second copy of all weights in memory.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._left = set(checkpoint.names())
        self._digest = hashlib.blake2b(digest_size=16)

    def digest(self) -> str:
        """Hexadecimal digest of the first elements of each tensor taken so far, in the order of taking.

        Two fine-tunes of one model share the configuration, often the name too; they hardly share all of these.
        """
        return self._digest.hexdigest()

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name that nobody has taken."""
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor in the model dtype on the model's device."""
        return self._read(name, shape).to(device=self._device, dtype=self._dtype)

    def take_stored(self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> torch.Tensor:
        """One tensor of one of these shapes and safetensors' dtypes, as it is on disk, on the model's device."""
        found = self._checkpoint.shape(name) if name in self._left else shapes[0]
        return self._read(name, found if found in shapes else shapes[0], dtypes).to(self._device)

    def take_fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Matrices of one width stacked on top of each other, or vectors put end to end."""
        if len(names) == 1:
            return self.take(names[0], shapes[0])
        rows = [shape[0] for shape in shapes]
        fused = self._empty((sum(rows), *shapes[0][1:]))
        self._copy_rows(fused, names, shapes)
        return fused

    def take_experts(self, names: Sequence[Sequence[str]], shapes: Sequence[tuple[int, int]]) -> torch.Tensor:
        """For each expert its matrices stacked on top of each other: [num_experts, rows, width]."""
        rows = sum(shape[0] for shape in shapes)
        stacked = self._empty((len(names), rows, shapes[0][1]))
        for expert, expert_names in enumerate(names):
            self._copy_rows(stacked[expert], expert_names, shapes)
        return stacked

    def drop_equal(self, name: str, other: torch.Tensor) -> None:
        """Skip the head of a tied checkpoint, where it is stored at all; it must equal the embedding."""
        if name not in self._left:
            return
        if not torch.equal(self.take(name, tuple(other.shape)), other):
            raise CheckpointError(f"tensor {name} differs from the embedding that config.json ties it to")

    def leave_out(self, *prefixes: str) -> None:
        """Skip the tensors whose names begin so: the model has no use for them, such as another task's head."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def finish(self) -> None:
        """Raise CheckpointError if the checkpoint holds tensors that nobody took."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"the model has no place for tensor {', '.join(names[:3])}{more}")

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _copy_rows(self, target: torch.Tensor, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            target[row : row + shape[0]].copy_(self._read(name, shape))
            row += shape[0]

    def _read(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = tuple(DTYPES)) -> torch.Tensor:
        self._strike_off(name, shape)
        tensor = self._checkpoint.read(name, dtypes)
        self._digest.update(tensor.reshape(-1)[:SAMPLED_ELEMENTS].float().cpu().numpy().tobytes())
        return tensor

    def _strike_off(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError for a tensor that is not there, was taken before, or has another shape."""
        if name not in self._left:
            raise CheckpointError(f"tensor {name} is missing")
        found = self._checkpoint.shape(name)
        if tuple(found) != shape:
            raise CheckpointError(f"tensor {name} has shape {list(found)}; config.json asks for {list(shape)}")
        self._left.remove(name)


class ShapeSource(TensorSource):
    """Does the same by the files' headers alone: its tensors have shape and dtype, and take no memory.

    0.3 s for the 18,867 tensors of Qwen3-30B-A3B.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, torch.device("meta"), torch.float32)

    def drop_equal(self, name: str, other: torch.Tensor) -> None:
        """Skip it likewise, where its shape is right; without values nobody knows whether it is equal."""
        if self.has(name):
            self.take(name, tuple(other.shape))

    def _read(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = tuple(DTYPES)) -> torch.Tensor:
        self._strike_off(name, shape)
        return torch.empty(shape, dtype=self._checkpoint.dtype(name, dtypes), device="meta")

    def _copy_rows(self, target: torch.Tensor, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        for name, shape in zip(names, shapes, strict=True):
            self._read(name, shape)
