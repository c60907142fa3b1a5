"""The decoder that Llama 3, Qwen3 and Qwen3-MoE share; the loader names their differences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CapabilityError
from engine.execution.forward_batch import ForwardBatch
from engine.execution.forward_result import ForwardResult
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
    lm_head: PackedWeight | None  # [V, H]; None: a body alone, which makes embeddings only
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
        self,
        batch: ForwardBatch,
        kv_cache: KVCacheTensors,
        observer: LayerObserver | None = None,
        *,
        logits_out: torch.Tensor | None = None,
    ) -> ForwardResult:
        """Run the batch, writing its keys and values into the cache.

        Only the tokens of `batch.logits_indices` see the vocabulary. logits_out [S, V] float32: where to write their
        logits, which then are the result's; None: a new tensor. Raises CapabilityError where there are any and the
        model has no head.
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
        logits = self._logits(residual, batch)
        if logits_out is not None:
            logits = logits_out.copy_(logits)
        result = ForwardResult(logits.float(), self._hidden(residual, batch))
        if observer is not None:
            observer.after(len(self.layers))
        return result

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[n, V] float32 of hidden states [n, H] behind the final norm. Raises CapabilityError without a head."""
        return self._head(normed).float()

    def _head(self, normed: torch.Tensor) -> torch.Tensor:
        """The same in the model dtype."""
        if self.lm_head is None:
            raise CapabilityError("the model has no lm_head: it makes embeddings only")
        return self.ops.linear(normed, self.lm_head)

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
