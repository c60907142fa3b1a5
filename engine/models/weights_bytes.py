"""How much memory a model's weights take."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.models.decoder_model import DecoderModel
from kernels.packed_weight import PackedWeight


def weights_bytes(model: DecoderModel) -> int:
    """Bytes of all weights as they lie in memory, packed or not; one that is two weights is counted once."""
    tensors = {id(tensor): tensor for tensor in _tensors(model)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _tensors(model: DecoderModel) -> Iterator[torch.Tensor]:
    yield from (model.embed_tokens, model.final_norm)
    if model.lm_head is not None:
        yield from model.lm_head.parts
    for layer in model.layers:
        yield from (layer.input_norm, layer.post_attention_norm)
        yield from (*layer.attention.qkv_proj.parts, *layer.attention.o_proj.parts)
        if layer.attention.qk_norm is not None:
            yield from layer.attention.qk_norm[:2]
        for value in vars(layer.mlp).values():
            if isinstance(value, PackedWeight):
                yield from value.parts
