"""The decoder that Llama 3, Qwen3 and Qwen3-MoE share; the loader names their differences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.execution.forward_batch import ForwardBatch
from engine.kv_cache.kv_cache_tensors import KVCacheTensors
from engine.models.decoder_layer import DecoderLayer
from engine.models.layer_observer import LayerObserver
from engine.models.streamed_layers import StreamedLayers
from kernels.interface import Operations
from kernels.packed_weight import PackedWeight


@dataclass(frozen=True, eq=False)
class DecoderModel:
    """Weights and the forward pass. Holds no state of a request: the batch is an argument."""

    config: ModelConfig
    ops: Operations
    embed_tokens: torch.Tensor  # [V, H]
    layers: tuple[DecoderLayer, ...] | StreamedLayers
    final_norm: torch.Tensor  # [H]
    lm_head: PackedWeight  # [V, H]
    weights_digest: str  # tells checkpoints apart, see TensorSource.digest

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """The model dtype."""
        return self.embed_tokens.dtype

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, kv_cache: KVCacheTensors, observer: LayerObserver | None = None
    ) -> torch.Tensor:
        """Run the batch, writing its keys and values into the cache.

        Returns the logits [S, V] in float32 of `batch.logits_indices`; only these tokens see the vocabulary.
        """
        x = torch.nn.functional.embedding(batch.token_ids, self.embed_tokens)
        residual = torch.zeros_like(x)
        if observer is not None:
            observer.after(-1)
        for index, layer in enumerate(self.layers):
            x = layer.forward(x, residual, batch, kv_cache.keys[index], kv_cache.values[index])
            if observer is not None:
                observer.after(index)
        residual += x
        wanted = residual.index_select(0, batch.logits_indices)
        normed = self.ops.rms_norm(wanted, self.final_norm, self.config.rms_norm_eps)
        logits = self.ops.linear(normed, self.lm_head).float()
        if observer is not None:
            observer.after(len(self.layers))
        return logits
