"""Builds a decoder from a checkpoint's tensors, by Hugging Face's names; refuses missing, extra and misshapen ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.moe_config import GroupedSigmoid, MoeConfig
from engine.checkpoint.rope import paired_dimensions, rope_cos_sin, unrotated_cos_sin
from engine.checkpoint.weights import Checkpoint, is_body_alone
from engine.errors import CheckpointError
from engine.models.biased_experts import BiasedMoeMLP, load_biased_experts
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
from engine.models.fused_experts import ACCEPTED, SCALES, ExpertStack, take_scaled_experts
from engine.models.placement import SHAPES_ONLY, ModelPlacement
from engine.models.quantised_weights import FLOATS, KV_SCALES, in_order, take_experts, take_kv_scales, take_weight
from engine.models.routing import SigmoidRouting
from engine.models.tensor_source import ShapeSource, TensorSource, head_weight
from kernels.operands import PackedWeight
from kernels.quantised import QuantisedWeight


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
    layers = []
    for layer in streamed.layers:
        layers.append(layer)
        source.release()  # what was packed has its own memory by now: the file's pages would count beside it
    source.finish()
    return replace(streamed, layers=tuple(layers))


def _stream_decoder(
    config: ModelConfig, source: TensorSource, placement: ModelPlacement, *, is_body: bool
) -> DecoderModel:
    root = "" if is_body else "model."
    has_kv_scales = config.quantization is not None and config.quantization.has_kv_scales
    if has_kv_scales and not placement.has_float8_cache:
        prefixes = [f"{root}layers.{index}.self_attn" for index in range(config.num_layers)]
        source.leave_out(*(f"{prefix}.{scale}" for prefix in prefixes for _, scale in KV_SCALES))
    extra = range(config.num_layers, config.num_layers + config.num_extra_layers)
    source.leave_out(*(f"{root}layers.{index}." for index in extra))  # they draft tokens, which nothing here checks
    vocabulary = (config.vocab_size, config.hidden_size)
    embed_tokens = source.take(f"{root}embed_tokens.weight", vocabulary)
    layers = StreamedLayers(_DecoderLayers(config, source, placement, root).load, config.num_layers)
    final_norm = _norm_weight(config, source, f"{root}norm.weight", config.hidden_size)
    classifier = None if config.classifier is None else _decoder_head(config, source, placement, embed_tokens)
    has_lm_head = not is_body and classifier is None
    lm_head = placement.pack(_head(config, source, embed_tokens)) if has_lm_head else None
    embedding = PackedWeight.unchanged(embed_tokens)
    if lm_head is not None and lm_head.has_rows and config.tie_word_embeddings:
        embedding = lm_head  # one copy is enough
    multiplier = config.multipliers.embedding
    if config.multipliers.rounds_embedding:
        multiplier = float(torch.tensor(multiplier).to(placement.dtype))
    return DecoderModel(
        *(config, placement.ops, embedding, layers, final_norm, lm_head, source.digest(), classifier), multiplier
    )


def _norm_weight(config: ModelConfig, source: TensorSource, name: str, size: int) -> torch.Tensor:
    """[size], with the 1 that some files leave out added in float32 and rounded to the model dtype once."""
    weight = source.take(name, (size,))
    return (weight.float() + 1).to(weight.dtype) if config.plus_one_norms else weight


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
    def rotated_locally(self) -> torch.Tensor:
        """The rotary table of layers with a window, where it is another."""
        table = rope_cos_sin(
            self.config.local_rope or self.config.rope, self.config.head_dim, self.placement.max_positions
        )
        return table.to(self.placement.device)

    @cached_property
    def unrotated(self) -> torch.Tensor:
        """The table of layers that know no positions, made where there are any."""
        return unrotated_cos_sin(self.config.head_dim, self.placement.max_positions).to(self.placement.device)

    def load(self, index: int) -> DecoderLayer:
        config, source = self.config, self.source
        prefix = f"{self.root}layers.{index}"
        mlp: DenseMLP | MoeMLP | BiasedMoeMLP
        if config.moe is not None and config.moe.names.is_biased:
            module = f"{prefix}.{config.moe.names.module}"
            mlp = load_biased_experts(source, self.placement, module, config.moe, config.hidden_size)
        elif config.moe is not None and config.is_moe_layer(index):
            mlp = self._moe(prefix, config.moe)
        else:
            parts = ("gate_up", "down") if config.fuses_projections else ("gate", "up", "down")
            mlp = self._dense([f"{prefix}.mlp.{part}_proj" for part in parts], config.intermediate_size)
        names = config.norms
        places = (names.before_attention, names.after_attention, names.before_mlp, names.after_mlp)
        norms = [
            None if name is None else _norm_weight(config, source, f"{prefix}.{name}.weight", config.hidden_size)
            for name in places
        ]
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
            q, k = (_norm_weight(config, self.source, *named) for named in zip(names, widths, strict=True))
            if self.order_of_head is not None:
                q, k = q.index_select(0, self.order_of_head), k.index_select(0, self.order_of_head)
            qk_norm = (q, k, config.rms_norm_eps)
        rows, qkv_bias = (q_rows, kv_rows, kv_rows), None
        if config.qkv_bias:  # before the weights, which may be quantised in a format that has zeros for a bias
            qkv_bias = self.source.take_fused([f"{prefix}.{part}_proj.bias" for part in "qkv"], [(n,) for n in rows])
            if self.order_of_qkv is not None:
                qkv_bias = qkv_bias.index_select(0, self.order_of_qkv)
        o_bias = self.source.take(f"{prefix}.o_proj.bias", (config.hidden_size,)) if config.output_bias else None
        sinks = self.source.take(f"{prefix}.sinks", (config.num_heads,)).float() if config.has_sinks else None
        kv_scales = None
        if self.placement.has_float8_cache:
            kv_scales = take_kv_scales(self.source, prefix, config).to(self.placement.device)
        return AttentionLayer(
            ops=self.placement.ops,
            qkv_proj=self._projection(prefix, "qkv", rows, config.hidden_size, fused="qkv", order=self.order_of_qkv),
            o_proj=self._projection(prefix, "o", (config.hidden_size,), q_rows),
            qk_norm=None if config.wide_qk_norm else qk_norm,
            wide_qk_norm=qk_norm if config.wide_qk_norm else None,
            cos_sin=self._cos_sin(index),
            scale=config.attention_scale,
            window=config.window_of(index),
            soft_cap=config.attention_cap,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            sinks=sinks,
            kv_scales=kv_scales,
        )

    def _cos_sin(self, index: int) -> torch.Tensor:
        config = self.config
        if index in config.unrotated_layers:
            return self.unrotated
        is_local = config.local_rope is not None and index in config.local_layers
        return self.rotated_locally if is_local else self.rotated

    @cached_property
    def order_of_head(self) -> torch.Tensor | None:
        """A head's dimensions so that halves are turned together; None: as they are in the file."""
        order = paired_dimensions(self.config.rope, self.config.head_dim)
        return None if order is None else order.to(self.placement.device)

    @cached_property
    def order_of_qkv(self) -> torch.Tensor | None:
        """The rows of queries and keys so that halves of a head are turned together, those of values as they are."""
        config = self.config
        order = self.order_of_head
        if order is None:
            return None
        num_paired = config.num_heads + config.num_kv_heads
        starts = torch.arange(num_paired, device=order.device)[:, None] * config.head_dim
        values = (
            torch.arange(config.num_kv_heads * config.head_dim, device=order.device) + starts.numel() * config.head_dim
        )
        return torch.cat(((starts + order).flatten(), values))

    def _dense(self, modules: Sequence[str], inner: int) -> DenseMLP:
        """modules: gate, up and down, or gate and up in one, and down. inner: rows of gate and of up."""
        *gate_up, down = modules
        hidden, quantization, pack = self.config.hidden_size, self.config.quantization, self.placement.pack
        shapes = [(2 * inner // len(gate_up), hidden)] * len(gate_up)
        return DenseMLP(
            ops=self.placement.ops,
            gate_up_proj=pack(take_weight(self.source, quantization, gate_up, shapes)),
            down_proj=pack(take_weight(self.source, quantization, [down], [(hidden, inner)])),
            activation=self.config.activation,
        )

    def _moe(self, layer: str, moe: MoeConfig) -> MoeMLP:
        prefix, hidden, shared = f"{layer}.{moe.names.module}", self.config.hidden_size, moe.shared
        routers, shapes = [f"{prefix}.{moe.names.router}"], [(moe.num_experts, hidden)]
        if shared is not None and shared.gate is not None:
            routers.append(f"{layer}.{shared.gate}")
            shapes.append((1, hidden))
        if moe.grouped_sigmoid is not None:
            router: torch.Tensor | QuantisedWeight = self.source.take(f"{routers[0]}.weight", shapes[0]).float()
        else:
            router = take_weight(self.source, self.config.quantization, routers, shapes)
        shared_mlp = None
        if shared is not None:
            shared_mlp = self._dense(
                [f"{layer}.{shared.module}.{part}" for part in shared.projections], moe.shared_size
            )
        gate_up, down = self._experts(prefix, moe)
        return MoeMLP(
            ops=self.placement.ops,
            router=self.placement.ops.pack(router, keep_dtype=True),
            gate_up_proj=self.placement.pack(gate_up),
            down_proj=self.placement.pack(down),
            top_k=moe.experts_per_token,
            renormalise=moe.norm_topk_prob,
            bucketed_min_tokens=self.placement.bucketed_min_tokens,
            shared=shared_mlp,
            routing=None if moe.grouped_sigmoid is None else self._routing(routers[0], moe, moe.grouped_sigmoid),
        )

    def _routing(self, router: str, moe: MoeConfig, groups: GroupedSigmoid) -> SigmoidRouting:
        bias = self.source.take_stored(f"{router}.e_score_correction_bias", [(moe.num_experts,)], FLOATS)
        return SigmoidRouting(
            bias=bias.float(),
            num_groups=groups.num_groups,
            chosen_groups=groups.chosen_groups,
            top_k=moe.experts_per_token,
            renormalise=moe.norm_topk_prob,
            scale=groups.scale,
        )

    def _experts(self, prefix: str, moe: MoeConfig) -> tuple[torch.Tensor | QuantisedWeight, ...]:
        """Gate and up [E, 2I, H], and down [E, H, I], of tensors for each expert, or for all."""
        hidden, inner = self.config.hidden_size, moe.intermediate_size
        modules, parts = f"{prefix}.experts", moe.names.projections
        stacks = (
            ("gate_up_proj", parts[:-1], (moe.num_experts, 2 * inner, hidden)),
            ("down_proj", parts[-1:], (moe.num_experts, hidden, inner)),
        )
        return tuple(
            self._expert_stack(
                ExpertStack(
                    f"{modules}.{name}",
                    f"{prefix}.{own[0]}.weight" if moe.names.is_fused else f"{modules}.{name}",
                    ()
                    if moe.names.is_fused
                    else tuple(tuple(f"{modules}.{n}.{part}.weight" for part in own) for n in range(moe.num_experts)),
                    shape,
                )
            )
            for name, own, shape in stacks
        )

    def _expert_stack(self, stack: ExpertStack) -> torch.Tensor | QuantisedWeight:
        """[E, N, K]. Raises CheckpointError where config.json calls a tensor of all experts quantised, and it has no
        scales of all.
        """
        source, quantization = self.source, self.config.quantization
        if stack.has_scales(source):
            return take_scaled_experts(source, quantization, stack)
        if stack.parts:
            modules = [[name.removesuffix(".weight") for name in names] for names in stack.parts]
            rows = stack.shape[1] // len(modules[0])
            return take_experts(source, quantization, modules, [(rows, stack.shape[2])] * len(modules[0]))
        module = stack.whole.removesuffix(".weight")
        if quantization is not None and quantization.scheme_of(module, source.has) is not None:
            raise CheckpointError(
                f"{module}: quantised experts in one tensor; accepted: unquantised ones, or e4m3 beside "
                f"{stack.name}{SCALES} ({ACCEPTED})"
            )
        return source.take(stack.whole, stack.shape)

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


def _decoder_head(
    config: ModelConfig, source: TensorSource, placement: ModelPlacement, embed_tokens: torch.Tensor
) -> ClassificationHead:
    """The head of classes, over the last token's hidden state: transformers' GenericForSequenceClassification, or rows
    of the head of tokens.
    """
    logits = () if config.classifier is None else config.classifier.token_logits
    if not logits:
        shape = (0 if config.classifier is None else len(config.classifier.labels), config.hidden_size)
        return ClassificationHead(placement.ops, head_weight(source, placement, "score", shape))
    if config.tie_word_embeddings:
        source.drop_equal("lm_head.weight", embed_tokens)
        head = embed_tokens
    else:
        head = source.take("lm_head.weight", (config.vocab_size, config.hidden_size))
    rows = head[[logit.token_id for logit in logits]].float()
    for index, logit in enumerate(logits):
        if logit.less_id is not None:
            rows[index] -= head[logit.less_id].float()
    return ClassificationHead(placement.ops, placement.ops.pack(rows / config.multipliers.logits, keep_dtype=True))
