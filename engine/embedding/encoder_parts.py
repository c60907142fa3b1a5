"""What the engine of an encoder is put together from."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.execution.observed_passes import ObservedPasses
from engine.models.encoder_model import EncoderModel
from engine.text.tokenizer import Tokenizer
from settings import EffectiveSettings


@dataclass(frozen=True, eq=False)
class EncoderParts:
    """What the engine of an encoder is put together from, loaded."""

    effective: EffectiveSettings  # fully derived
    model: EncoderModel
    passes: ObservedPasses
    tokenizer: Tokenizer
    embedding: EmbeddingConfig
    max_model_len: int  # tokens of one input
