"""A BERT encoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.checkpoint.encoder_config import EncoderConfig
from engine.models.encoder_layer import EncoderLayer
from engine.models.layer_norm import LayerNorm
from engine.models.layer_observer import LayerObserver
from engine.models.packed_tokens import PackedTokens


@dataclass(frozen=True, eq=False)
class EncoderModel:
    """Weights and the forward pass (arXiv 1810.04805), of sequences that are one segment each. Needs no KV cache.

    Products are `Operations.linear` over packed weights; the rest is torch's own on CPUs and GPUs alike.
    """

    config: EncoderConfig
    word_embeddings: torch.Tensor  # [V, H]
    # [positions, H]: the position's and the first segment's embeddings, added up
    position_embeddings: torch.Tensor
    embedding_norm: LayerNorm
    layers: tuple[EncoderLayer, ...]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.word_embeddings.device

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
