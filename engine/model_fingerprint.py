"""Tells models apart, cheaply."""

from __future__ import annotations

import hashlib

from engine.models.decoder_model import DecoderModel


def model_fingerprint(model: DecoderModel) -> str:
    """Digest of the model's configuration, where and how it is computed, and the first elements of its weights.

    How: an engine with int8 weights has other logits than one without, as has a deterministic one, and each of them has
    products of its own.
    """
    products = model.ops.linear.__module__
    computed = (model.config, model.device.type, products, str(model.dtype), model.weights_digest)
    return hashlib.blake2b(repr(computed).encode(), digest_size=16).hexdigest()
