"""The loaded parts that an engine is built from: made in `loading.load`, used by `Engine` and `EncoderEngine`."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.execution.forward import EncoderExecutor, StepExecutor
from engine.kv_cache.block_manager import BlockManager
from engine.model_interface import ModelInterface
from engine.text.tokenizer import Tokenizer
from settings import EffectiveSettings


@dataclass(frozen=True, eq=False)
class EngineParts:
    """What an engine is built from: loaded, warmed up, with one block manager."""

    effective: EffectiveSettings  # fully derived
    executor: StepExecutor
    model_interface: ModelInterface
    block_manager: BlockManager
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    embedding: EmbeddingConfig


@dataclass(frozen=True, eq=False)
class EncoderParts:
    """What the engine of an encoder is built from: loaded, warmed up."""

    effective: EffectiveSettings  # fully derived
    executor: EncoderExecutor
    tokenizer: Tokenizer
    embedding: EmbeddingConfig
    max_model_len: int  # tokens of one input
