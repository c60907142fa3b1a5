"""The encoder of BERT, ModernBERT and their kin: whole sequences, packed end to end, whose tokens see those behind them
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import torch

from engine.checkpoint.encoder_config import EncoderConfig
from engine.models.classifier import ClassificationHead, Elementwise
from engine.models.decoder import LayerObserver
from kernels.interface import Operations
from kernels.operands import PackedWeight

# Queries whose keys nearby are attended together: with ModernBERT's reach of 64 half of the keys are a query's own.
LOCAL_QUERIES = 256


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """T tokens of some sequences, end to end, without padding."""

    token_ids: torch.Tensor  # [T], int64
    positions: torch.Tensor  # [T], int64, rows of the model's position_embeddings
    offsets: torch.Tensor  # [T], int64, counted from each sequence's first token on
    lengths: tuple[int, ...]  # tokens of each sequence, T in all
    # Sequences of one length are attended together: for each length the tokens of its sequences, [n, length] int64.
    rows_by_length: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], positions: torch.Tensor, device: torch.device) -> Self:
        """Pack sequences of token ids, none of them empty, end to end as their `positions` [T] are."""
        lengths = tuple(map(len, sequences))
        starts: dict[int, list[int]] = {}
        start = 0
        for length in lengths:
            starts.setdefault(length, []).append(start)
            start += length
        rows = tuple(
            (torch.tensor(firsts)[:, None] + torch.arange(length)).to(device) for length, firsts in starts.items()
        )
        return cls(
            token_ids=torch.tensor(list(chain.from_iterable(sequences)), dtype=torch.int64, device=device),
            positions=positions.to(device),
            offsets=torch.cat([torch.arange(length) for length in lengths]).to(device),
            lengths=lengths,
            rows_by_length=rows,
        )


@dataclass(frozen=True, eq=False)
class Affine:
    """`x @ weight.T + bias`."""

    ops: Operations
    weight: PackedWeight  # [N, K]
    bias: torch.Tensor | None  # [N]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        product = self.ops.linear(x, self.weight)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Over the last dimension, with weight and bias (arXiv 1607.06450)."""

    weight: torch.Tensor  # [H]
    bias: torch.Tensor | None  # [H]
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, eq=False)
class EncoderLayer:
    """Bidirectional attention and feed-forward. Each is normalised together with its input (post-norm, BERT), or has
    its input normalised (pre-norm, ModernBERT).
    """

    qkv_proj: Affine  # [3H, H]: queries, keys, values
    o_proj: Affine  # [H, H]
    attention_norm: LayerNorm | None  # None: its input is normalised already
    up_proj: Affine  # [I, H]; [2I, H] of a gated MLP: what is activated, and what it is multiplied with
    down_proj: Affine  # [H, I]
    mlp_norm: LayerNorm
    num_heads: int
    activation: Elementwise
    norms_first: bool = False
    is_gated: bool = False
    reach: int | None = None  # tokens that a token sees on each side of it; None: all

    def forward(self, x: torch.Tensor, tokens: PackedTokens, cos_sin: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, H] -> [T, H]. cos_sin: [T, D] float32, how each token's queries and keys are rotated; None: not."""
        if self.norms_first:
            x = x + self._attended(x if self.attention_norm is None else self.attention_norm(x), tokens, cos_sin)
            return x + self._fed_forward(self.mlp_norm(x))
        x = self._attended(x, tokens, cos_sin) + x
        x = x if self.attention_norm is None else self.attention_norm(x)
        return self.mlp_norm(self._fed_forward(x) + x)

    def _attended(self, x: torch.Tensor, tokens: PackedTokens, cos_sin: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        if cos_sin is not None:
            q, k = rotated(q, cos_sin), rotated(k, cos_sin)
        return self.o_proj(bidirectional_attention(q, k, v, tokens, self.reach).flatten(1))

    def _fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up_proj(x)
        if not self.is_gated:
            return self.down_proj(self.activation(inner))
        gate, up = inner.chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up)


@dataclass(frozen=True, eq=False)
class EncoderModel:
    """Weights and the forward pass. A sequence is one segment, or a pair's two. It has no KV cache.

    Products are `Operations.linear` over packed weights; the rest is torch's own on CPUs and GPUs alike.
    """

    config: EncoderConfig
    word_embeddings: torch.Tensor  # [V, H]
    # [positions, H]: with the first segment's embedding added; behind them, in a model that takes pairs, as many rows
    # with the second's. Without learned positions: [segments, H]. None: it has neither.
    position_embeddings: torch.Tensor | None
    embedding_norm: LayerNorm
    layers: tuple[EncoderLayer, ...]
    classifier: ClassificationHead | None = None  # None: there is none
    # [positions, D] float32, cosines and sines, of layers that see everything, and of the others; None: no rotation
    rotations: tuple[torch.Tensor, torch.Tensor] | None = None
    final_norm: LayerNorm | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.word_embeddings.device

    def pack(self, sequences: Sequence[Sequence[int]], second_starts: Sequence[int] = ()) -> PackedTokens:
        """Pack sequences of token ids, none of them empty. second_starts: for each, where the tokens of a pair's second
        text begin; left out: there are no pairs.
        """
        starts = second_starts or list(map(len, sequences))
        places = [self._places(*each) for each in zip(sequences, starts, strict=True)]
        return PackedTokens.of(sequences, torch.cat(places), self.device)

    def _places(self, token_ids: Sequence[int], second_start: int) -> torch.Tensor:
        """Rows of `position_embeddings` [n] for the n tokens of a sequence."""
        table, padding_id = self.position_embeddings, self.config.padding_id
        rows_a_segment = 1 if self.rotations is not None else self.config.max_position_embeddings
        if self.rotations is not None:
            places = torch.zeros(len(token_ids), dtype=torch.int64)
        elif padding_id is None:
            places = torch.arange(len(token_ids))
        else:
            counts = torch.tensor(token_ids) != padding_id
            places = counts.cumsum(0) * counts + padding_id
        if table is not None and table.shape[0] > rows_a_segment:
            places[second_start:] += rows_a_segment
        return places

    @torch.inference_mode()
    def forward(self, tokens: PackedTokens, observer: LayerObserver | None = None) -> torch.Tensor:
        """The hidden states [T, H] of the last layer, in the model dtype."""
        x = torch.nn.functional.embedding(tokens.token_ids, self.word_embeddings)
        if self.position_embeddings is not None:
            x = x + torch.nn.functional.embedding(tokens.positions, self.position_embeddings)
        x = self.embedding_norm(x)
        full, local = (None, None) if self.rotations is None else (each[tokens.offsets] for each in self.rotations)
        if observer is not None:
            observer.after(-1)
        for index, layer in enumerate(self.layers):
            x = layer.forward(x, tokens, full if layer.reach is None else local)
            if observer is not None:
                observer.after(index)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if observer is not None:
            observer.after(len(self.layers))
        return x


def rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] turned in pairs (i, i + D / 2) by cos_sin [T, D], in float32: cosines first, then sines."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def bidirectional_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: PackedTokens, reach: int | None = None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence. q, k, v: [T, heads, D] -> [T, heads, D].

    reach: a query sees the keys that are no further away; None: all. One call of torch's attention for each length
    that occurs: nothing is padded, so nothing has to be masked for it.
    """
    output = torch.empty_like(q)
    for rows in tokens.rows_by_length:
        queries, keys, values = (x[rows].transpose(1, 2) for x in (q, k, v))  # [n, heads, length, D]
        if reach is None or rows.shape[1] <= reach + 1:
            attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
        else:
            attended = _local_attention(queries, keys, values, reach)
        output[rows] = attended.transpose(1, 2)
    return output


def _local_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: int) -> torch.Tensor:
    """The same of [n, heads, length, D], where only keys within `reach` are read: time and masks grow with length."""
    length, parts = q.shape[2], []
    for start in range(0, length, LOCAL_QUERIES):
        end = min(start + LOCAL_QUERIES, length)
        first, last = max(start - reach, 0), min(end + reach, length)
        places = torch.arange(first, last, device=q.device)
        seen = (places[start - first : end - first, None] - places[None, :]).abs() <= reach
        near = (q[:, :, start:end], k[:, :, first:last], v[:, :, first:last])
        parts.append(torch.nn.functional.scaled_dot_product_attention(*near, attn_mask=seen))
    return torch.cat(parts, dim=2)
