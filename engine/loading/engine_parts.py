"""What an engine is put together from."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.execution.step_executor import StepExecutor
from engine.kv_cache.block_manager import BlockManager
from engine.runner.model_runner import ModelRunner
from engine.text.tokenizer import Tokenizer
from settings import EffectiveSettings


@dataclass(frozen=True, eq=False)
class EngineParts:
    """What an engine is put together from: loaded, warmed up, sharing one block manager."""

    effective: EffectiveSettings  # fully derived
    executor: StepExecutor
    runner: ModelRunner
    block_manager: BlockManager
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    embedding: EmbeddingConfig
