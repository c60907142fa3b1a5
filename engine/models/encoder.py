"""The encoder of BERT and its kin: whole sequences, packed end to end, in which every token sees every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Self

import torch

from engine.checkpoint.encoder_config import EncoderConfig
from engine.models.classifier import ClassificationHead
from engine.models.decoder import LayerObserver
from kernels.interface import Operations
from kernels.operands import PackedWeight

GeluForm = Literal["none", "tanh"]  # exact, or its tanh approximation


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """T tokens of some sequences, end to end, without padding."""

    token_ids: torch.Tensor  # [T], int64
    positions: torch.Tensor  # [T], int64, rows of the model's position_embeddings
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
            lengths=lengths,
            rows_by_length=rows,
        )


@dataclass(frozen=True, eq=False)
class Affine:
    """`x @ weight.T + bias`."""

    ops: Operations
    weight: PackedWeight  # [N, K]
    bias: torch.Tensor  # [N]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        return self.ops.linear(x, self.weight) + self.bias


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Over the last dimension, with weight and bias (arXiv 1607.06450)."""

    weight: torch.Tensor  # [H]
    bias: torch.Tensor  # [H]
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, eq=False)
class EncoderLayer:
    """Bidirectional attention and feed-forward, each normalised together with its input (post-norm, BERT)."""

    qkv_proj: Affine  # [3H, H]: queries, keys, values
    o_proj: Affine  # [H, H]
    attention_norm: LayerNorm
    up_proj: Affine  # [I, H]
    down_proj: Affine  # [H, I]
    output_norm: LayerNorm
    num_heads: int
    gelu: GeluForm | None  # None: relu

    def forward(self, x: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        q, k, v = self.qkv_proj(x).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        attended = bidirectional_attention(q, k, v, tokens)
        x = self.attention_norm(self.o_proj(attended.flatten(1)) + x)
        return self.output_norm(self.down_proj(self._activated(self.up_proj(x))) + x)

    def _activated(self, inner: torch.Tensor) -> torch.Tensor:
        if self.gelu is None:
            return torch.nn.functional.relu(inner)
        return torch.nn.functional.gelu(inner, approximate=self.gelu)


@dataclass(frozen=True, eq=False)
class EncoderModel:
    """Weights and the forward pass (arXiv 1810.04805). A sequence is one segment, or a pair's two. It has no KV cache.

    Products are `Operations.linear` over packed weights; the rest is torch's own on CPUs and GPUs alike.
    """

    config: EncoderConfig
    word_embeddings: torch.Tensor  # [V, H]
    # [positions, H]: with the first segment's embedding added; behind them, in a model that takes pairs, as many rows
    # with the second's.
    position_embeddings: torch.Tensor
    embedding_norm: LayerNorm
    layers: tuple[EncoderLayer, ...]
    classifier: ClassificationHead | None = None  # None: there is none

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
        padding_id = self.config.padding_id
        if padding_id is None:
            places = torch.arange(len(token_ids))
        else:
            counts = torch.tensor(token_ids) != padding_id
            places = counts.cumsum(0) * counts + padding_id
        if self.position_embeddings.shape[0] > self.config.max_position_embeddings:
            places[second_start:] += self.config.max_position_embeddings
        return places

    @torch.inference_mode()
    def forward(self, tokens: PackedTokens, observer: LayerObserver | None = None) -> torch.Tensor:
        """The hidden states [T, H] of the last layer, in the model dtype."""
        words = torch.nn.functional.embedding(tokens.token_ids, self.word_embeddings)
        places = torch.nn.functional.embedding(tokens.positions, self.position_embeddings)
        x = self.embedding_norm(words + places)
        if observer is not None:
            observer.after(-1)
        for index, layer in enumerate(self.layers):
            x = layer.forward(x, tokens)
            if observer is not None:
                observer.after(index)
        if observer is not None:
            observer.after(len(self.layers))
        return x


def bidirectional_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence. q, k, v: [T, heads, D] -> [T, heads, D].

    One call of torch's attention for each length that occurs: nothing is padded, so nothing has to be masked.
    """
    output = torch.empty_like(q)
    for rows in tokens.rows_by_length:
        queries, keys, values = (x[rows].transpose(1, 2) for x in (q, k, v))  # [n, heads, length, D]
        attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
        output[rows] = attended.transpose(1, 2)
    return output
