"""The decoder that all families of `engine.checkpoint.families` share, and what its forward pass takes and answers.

Where the families differ, the loader puts in other parts and numbers: a norm for queries and keys, a bias, a dense or
an expert MLP, a multiplier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from engine.checkpoint.families import Activation
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CapabilityError
from engine.kv_cache.tensors import KVCacheTensors
from engine.models.biased_experts import BiasedMoeMLP
from engine.models.classifier import ClassificationHead
from engine.models.routing import SigmoidRouting
from kernels.interface import Operations
from kernels.operands import AttentionRows, ExpertOutputs, PackedWeight, ProjectedHeads


@dataclass(frozen=True, eq=False)
class LastTokens:
    """The last token of each item, one row of attention each: all that is wanted of a step's last layer, once it has
    written its keys and values, where no item wants hidden states.
    """

    rows: AttentionRows  # R rows with one query each
    indices: torch.Tensor  # [R], int64, into T


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One forward pass as a value: T tokens, those of rows with one query (decode) first, then the chunks."""

    token_ids: torch.Tensor  # [T], int64
    positions: torch.Tensor  # [T], int64
    slot_mapping: torch.Tensor  # [T], int64, block_id * block_size + offset
    # [S], int64, into T or, where `last` is given, its R rows: whose logits are wanted, in the order of the items
    logits_indices: torch.Tensor
    hidden_indices: torch.Tensor  # [W], int64, into T: whose hidden states are wanted, item after item
    hidden_lens: tuple[int, ...]  # tokens of each item that wants them; W in all
    decode: AttentionRows | None  # the first `num_decode_tokens` tokens; None when there are none
    prefill: AttentionRows | None  # the others
    num_decode_tokens: int
    last: LastTokens | None = None  # None: the last layer is like the others


@dataclass(frozen=True, eq=False, slots=True)
class ForwardResult:
    """Logits and hidden states of those items that want them, each in the order of the items."""

    # [S, V], model dtype: of the last token of each of the S items that want logits; [0, V] where `chosen` is given
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]  # one [n, H] an item that wants them, model dtype: final norm, all its n tokens
    chosen: torch.Tensor | None = None  # [2, S] where a graph has chosen tokens: see `Operations.choose_tokens`


class LayerObserver(Protocol):
    """Is told of each stage of a forward pass: the embedding (-1), each layer (its index), the logits (num_layers)."""

    def after(self, index: int) -> None:
        """Stage `index` has been launched."""


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """Grouped-query attention (arXiv 2305.13245) over the paged KV cache; QK-norm where the family has it."""

    ops: Operations
    qkv_proj: PackedWeight  # [(Hq + 2 Hkv) * D, H]: queries, keys, values
    o_proj: PackedWeight  # [H, Hq * D]
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None  # query weight [D], key weight [D], eps
    cos_sin: torch.Tensor  # [max_positions, D], float32, shared by layers
    scale: float  # of the products of queries and keys
    qkv_bias: torch.Tensor | None = None  # [(Hq + 2 Hkv) * D]
    o_bias: torch.Tensor | None = None  # [H]
    sinks: torch.Tensor | None = None  # [Hq], float32: a score more of each head
    window: int | None = None  # keys that a query sees at most, its own included; None: all up to its own
    soft_cap: float | None = None  # c: a score s becomes c * tanh(s / c)
    wide_qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None  # over all heads: [Hq * D], [Hkv * D], eps
    kv_scales: torch.Tensor | None = None  # [2, Hkv], float32: see `Operations`; None: the caches are not float8

    def forward(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        """x [T, H] -> [T, H], or [R, H] of the last tokens; writes this step's keys and values into the caches."""
        ops = self.ops
        qkv = ops.linear(x, self.qkv_proj)
        if self.qkv_bias is not None:
            qkv += self.qkv_bias
        if self.wide_qk_norm is not None:
            self._norm_queries_and_keys(qkv, *self.wide_qk_norm)
        caches = (k_cache, v_cache, batch.slot_mapping, self.kv_scales)
        heads = ProjectedHeads(qkv, self.qk_norm, self.cos_sin, batch.positions, *caches)
        scale = self.scale
        if batch.decode is not None and batch.prefill is None and last is None:
            attended = ops.store_and_decode(heads, self._seen(batch.decode), scale)
            return self._output(attended)
        q = ops.qk_norm_rope_store_kv(*heads)
        split = batch.num_decode_tokens
        parts: list[torch.Tensor] = []
        if last is not None:
            q = q.index_select(0, last.indices)
            parts.append(ops.paged_decode_attention(q, k_cache, v_cache, self._seen(last.rows), scale))
        else:
            if batch.decode is not None:
                parts.append(ops.paged_decode_attention(q[:split], k_cache, v_cache, self._seen(batch.decode), scale))
            if batch.prefill is not None:
                parts.append(ops.paged_prefill_attention(q[split:], k_cache, v_cache, self._seen(batch.prefill), scale))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._output(attended)

    def _norm_queries_and_keys(self, qkv: torch.Tensor, q: torch.Tensor, k: torch.Tensor, eps: float) -> None:
        """In place."""
        queries, keys = qkv[:, : q.shape[0]], qkv[:, q.shape[0] : q.shape[0] + k.shape[0]]
        for heads, weight in ((queries, q), (keys, k)):
            heads.copy_(self.ops.rms_norm(heads, weight, eps))

    def _seen(self, rows: AttentionRows) -> AttentionRows:
        seen = rows if self.window is None else rows.windowed(self.window)
        return seen.scored(self.soft_cap, self.sinks).scaled(self.kv_scales)

    def _output(self, attended: torch.Tensor) -> torch.Tensor:
        """attended [T, Hq, D] -> [T, H]."""
        out = self.ops.linear(attended.reshape(attended.shape[0], -1), self.o_proj)
        return out if self.o_bias is None else out.add_(self.o_bias)


@dataclass(frozen=True, eq=False)
class DenseMLP:
    """SwiGLU or GeGLU feed-forward (arXiv 2002.05202)."""

    ops: Operations
    gate_up_proj: PackedWeight  # [2I, H], gate first
    down_proj: PackedWeight  # [H, I]
    activation: Activation = "silu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        if self.activation == "gelu_tanh":
            return self.ops.linear(self.ops.gelu_and_mul(self.ops.linear(x, self.gate_up_proj)), self.down_proj)
        return self.ops.linear(self.ops.linear(x, self.gate_up_proj, gated=True), self.down_proj)


@dataclass(frozen=True, eq=False)
class MoeMLP:
    """Routed SwiGLU experts: softmax over all experts, the top k of them, weights renormalised if asked, unless the
    family routes otherwise; and one that every token goes through, where the family has it.
    """

    ops: Operations
    router: PackedWeight  # [E, H], or [E + 1, H]: the last row is the shared expert's gate; float32 beside `routing`
    gate_up_proj: PackedWeight  # [E, 2I, H]
    down_proj: PackedWeight  # [E, H, I]
    top_k: int
    renormalise: bool
    bucketed_min_tokens: int | None  # from so many tokens on, sort by expert and run one GEMM each; None: never
    shared: DenseMLP | None = None
    routing: SigmoidRouting | None = None  # None: the softmax

    def forward(self, x: torch.Tensor) -> torch.Tensor | ExpertOutputs:
        """x [T, H] -> [T, H], or what is added up to that."""
        num_experts = self.gate_up_proj.shape[0]
        router_logits = self.ops.linear(x if self.routing is None else x.float(), self.router)
        if self.shared is None:
            return self._routed(x, router_logits)
        routed = self._routed(x, router_logits[:, :num_experts])
        added = self.ops.combine_experts(*routed) if isinstance(routed, ExpertOutputs) else routed
        shared = self.shared.forward(x)
        if router_logits.shape[1] > num_experts:
            shared *= router_logits[:, num_experts:].sigmoid()
        return added.add_(shared)

    def _routed(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor | ExpertOutputs:
        ops = self.ops
        chosen = None if self.routing is None else self.routing.route(router_logits)
        if self.bucketed_min_tokens is None or x.shape[0] < self.bucketed_min_tokens:
            if chosen is None:
                chosen = ops.route_topk(router_logits, self.top_k, renormalise=self.renormalise)
            return ops.moe_small_batch(x, self.gate_up_proj, self.down_proj, chosen)
        if chosen is None:
            weights, layout = ops.route_and_sort(router_logits, self.top_k, renormalise=self.renormalise)
        else:
            weights, layout = chosen.weights, ops.sort_tokens_by_expert(chosen.expert_ids, router_logits.shape[1])
        hidden = ops.grouped_gemm(x, self.gate_up_proj, layout, gather=True, gated=True)
        rows = ops.grouped_gemm(hidden, self.down_proj, layout, gather=False)
        return ExpertOutputs(rows, layout, weights)


class LayerNorms(NamedTuple):
    """Weights of a layer's norms, each [H]; None: there is none."""

    before_attention: torch.Tensor | None
    after_attention: torch.Tensor | None  # of what attention adds
    before_mlp: torch.Tensor | None
    after_mlp: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """Attention and feed-forward with norms before them, behind or both; the residual stream is kept in place."""

    ops: Operations
    norms: LayerNorms
    attention: AttentionLayer
    mlp: DenseMLP | MoeMLP | BiasedMoeMLP
    eps: float
    residual_multiplier: float = 1.0  # of what attention and MLP add

    def forward(
        self,
        x: torch.Tensor | ExpertOutputs,
        residual: torch.Tensor,
        batch: ForwardBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor | ExpertOutputs, torch.Tensor]:
        """x [T, H], the previous layer's output, is added to residual [T, H] in place; returns this layer's output and
        the residual, both [R, H] where the last tokens alone are wanted. What experts answered is left to the next
        layer's norm to add up, unless it is scaled.
        """
        norms = self.norms
        attended = self.attention.forward(
            self._added(x, residual, norms.before_attention), batch, k_cache, v_cache, last
        )
        if last is not None:
            residual = residual.index_select(0, last.indices)
        normed = self._added(self._to_add(attended, norms.after_attention), residual, norms.before_mlp)
        added = self.mlp.forward(normed)
        if self.residual_multiplier == 1 and norms.after_mlp is None:
            return added, residual
        # The next layer's norm adds experts up as they are, so they are added up here to be normed or scaled.
        added = self.ops.combine_experts(*added) if isinstance(added, ExpertOutputs) else added
        return self._to_add(added, norms.after_mlp), residual

    def _added(
        self, x: torch.Tensor | ExpertOutputs, residual: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """x is added to residual in place; the sum, normed where there is a norm."""
        if norm is None:
            residual += self.ops.combine_experts(*x) if isinstance(x, ExpertOutputs) else x
            return residual
        if isinstance(x, ExpertOutputs):
            return self.ops.add_experts_rms_norm(x, residual, norm, self.eps)
        return self.ops.fused_add_rms_norm(x, residual, norm, self.eps)

    def _to_add(self, added: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            added = self.ops.rms_norm(added, norm, self.eps)
        return added if self.residual_multiplier == 1 else added.mul_(self.residual_multiplier)


class StreamedLayers:
    """Layers loaded when a forward pass comes to them and dropped when it goes on: for one pass over a whole model."""

    def __init__(self, load: Callable[[int], DecoderLayer], num_layers: int) -> None:
        """load: index -> layer."""
        self._load = load
        self._num_layers = num_layers

    def __len__(self) -> int:
        return self._num_layers

    def __iter__(self) -> Iterator[DecoderLayer]:
        return map(self._load, range(self._num_layers))


@dataclass(frozen=True, eq=False)
class DecoderModel:
    """Weights and the forward pass. Holds no state of a request: the batch is an argument."""

    config: ModelConfig
    ops: Operations
    embed_tokens: PackedWeight  # [V, H], whose rows are looked up: lm_head, where that is the same and has rows
    layers: tuple[DecoderLayer, ...] | StreamedLayers
    final_norm: torch.Tensor  # [H]
    lm_head: PackedWeight | None  # [V, H]; None: a body alone, which makes embeddings only, or with a head of classes
    weights_digest: str  # tells checkpoints apart, see TensorSource.digest
    classifier: ClassificationHead | None = None  # None: there is none
    embedding_multiplier: float = (
        1.0  # the configuration's, rounded where the family has it in the dtype of its weights
    )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.final_norm.device

    @property
    def dtype(self) -> torch.dtype:
        """The model dtype."""
        return self.final_norm.dtype

    @property
    def has_float8_cache(self) -> bool:
        """Whether it writes a KV cache in float8."""
        return any(layer.attention.kv_scales is not None for layer in self.layers)

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: KVCacheTensors,
        observer: LayerObserver | None = None,
    ) -> ForwardResult:
        """Run the batch, writing its keys and values into the cache.

        Logits are computed for the tokens of `batch.logits_indices` alone. Raises CapabilityError where any are
        wanted and the model has no head.
        """
        embedded = self.embed_tokens.rows(batch.token_ids)
        if self.config.multipliers.embedding != 1:
            embedded *= self.embedding_multiplier
        x: torch.Tensor | ExpertOutputs = embedded
        residual = torch.zeros_like(embedded)
        if observer is not None:
            observer.after(-1)
        for index, layer in enumerate(self.layers):
            last = batch.last if index == len(self.layers) - 1 else None
            x, residual = layer.forward(x, residual, batch, kv_cache.keys[index], kv_cache.values[index], last)
            if observer is not None:
                observer.after(index)
        residual += self.ops.combine_experts(*x) if isinstance(x, ExpertOutputs) else x
        result = ForwardResult(self._logits(residual, batch), self._hidden(residual, batch))
        if observer is not None:
            observer.after(len(self.layers))
        return result

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[n, V] float32 of hidden states [n, H] behind the final norm. Raises CapabilityError without a head."""
        return self._head(normed).float()

    def _head(self, normed: torch.Tensor) -> torch.Tensor:
        """The same in the model dtype."""
        if self.lm_head is None:
            raise CapabilityError("the model has no lm_head: it generates nothing")
        logits = self.ops.linear(normed, self.lm_head)
        scaling = self.config.multipliers.logits
        if scaling != 1:
            logits.div_(scaling)
        if self.config.logits_cap is not None:
            self.ops.cap_logits(logits, self.config.logits_cap)
        return logits

    def _logits(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[S, V], model dtype."""
        if not batch.logits_indices.shape[0]:
            return torch.empty((0, self.config.vocab_size), dtype=self.dtype, device=self.device)
        return self._head(self._normed(residual, batch.logits_indices))

    def _hidden(self, residual: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        if not batch.hidden_lens:
            return ()
        return torch.split(self._normed(residual, batch.hidden_indices), list(batch.hidden_lens))

    def _normed(self, residual: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(residual.index_select(0, indices), self.final_norm, self.config.rms_norm_eps)


def weights_bytes(model: DecoderModel) -> int:
    """Bytes of all weights as they lie in memory, packed or not; one that is two weights is counted once."""
    tensors = {id(tensor): tensor for tensor in _tensors(model)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _tensors(model: DecoderModel) -> Iterator[torch.Tensor]:
    yield from (*model.embed_tokens.parts, model.final_norm)
    for layer in model.layers:
        yield from (norm for norm in layer.norms if norm is not None)
        for qk_norm in (layer.attention.qk_norm, layer.attention.wide_qk_norm):
            yield from () if qk_norm is None else qk_norm[:2]
        attention = layer.attention
        yield from (each for each in (attention.qkv_bias, attention.o_bias, attention.sinks) if each is not None)
        yield from (value for value in vars(layer.mlp).values() if isinstance(value, torch.Tensor))
        if isinstance(layer.mlp, MoeMLP) and layer.mlp.routing is not None:
            yield layer.mlp.routing.bias
    for weight in packed_weights(model):
        yield from weight.parts


def packed_weights(model: DecoderModel) -> Iterator[PackedWeight]:
    """The weights of all products: the head, and those of each layer."""
    if model.lm_head is not None:
        yield model.lm_head
    if model.classifier is not None:
        yield model.classifier.classes
    for layer in model.layers:
        yield from (layer.attention.qkv_proj, layer.attention.o_proj)
        yield from _products(layer.mlp)
        if isinstance(layer.mlp, MoeMLP) and layer.mlp.shared is not None:
            yield from _products(layer.mlp.shared)


def _products(mlp: DenseMLP | MoeMLP | BiasedMoeMLP) -> Iterator[PackedWeight]:
    yield from (value for value in vars(mlp).values() if isinstance(value, PackedWeight))
