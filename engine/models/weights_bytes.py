"""How much memory a model's weights take."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.models.decoder_model import DecoderModel


def weights_bytes(model: DecoderModel) -> int:
    """Bytes of all weights, a tied tensor counted once."""
    tensors = {id(tensor): tensor for tensor in _weights(model)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _weights(model: DecoderModel) -> Iterator[torch.Tensor]:
    yield from (model.embed_tokens, model.final_norm, model.lm_head)
    for layer in model.layers:
        yield from (layer.input_norm, layer.post_attention_norm)
        yield from (layer.attention.qkv_proj, layer.attention.o_proj)
        if layer.attention.qk_norm is not None:
            yield from layer.attention.qk_norm[:2]
        for value in vars(layer.mlp).values():
            if isinstance(value, torch.Tensor):
                yield value
