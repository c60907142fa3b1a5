"""What the engine of an encoder is put together from."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.embedding.encoder_executor import EncoderExecutor
from engine.text.tokenizer import Tokenizer
from settings import EffectiveSettings


@dataclass(frozen=True, eq=False)
class EncoderParts:
    """What the engine of an encoder is put together from: loaded, warmed up."""

    effective: EffectiveSettings  # fully derived
    executor: EncoderExecutor
    tokenizer: Tokenizer
    embedding: EmbeddingConfig
    max_model_len: int  # tokens of one input
