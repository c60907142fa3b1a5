"""From settings to a loaded encoder."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.checkpoint.encoder_config import EncoderConfig
from engine.embedding.encoder_parts import EncoderParts
from engine.errors import EngineFatal
from engine.execution.observed_passes import ObservedPasses
from engine.execution.pass_trace import PassTrace
from engine.loading.choose_operations import choose_operations
from engine.loading.dtypes import DTYPES
from engine.loading.matmul_precision import require_float32_sums
from engine.models.load_encoder import load_encoder
from engine.models.model_placement import ModelPlacement
from engine.text.tokenizer import Tokenizer
from settings import EffectiveSettings


def load_encoder_parts(
    effective: EffectiveSettings, path: Path, config: EncoderConfig, pass_trace: PassTrace | None
) -> EncoderParts:
    """Load everything the engine of an encoder needs. effective: fully derived."""
    settings = effective.settings.engine
    if settings.max_model_len is None or settings.num_threads is None:
        raise EngineFatal("derive_settings left engine.num_threads or max_model_len unset")
    device = torch.device(settings.device)
    torch.set_num_threads(settings.num_threads)
    require_float32_sums()
    placement = ModelPlacement(
        device=device,
        dtype=DTYPES[settings.dtype],
        ops=choose_operations(settings, device),
        max_positions=config.max_position_embeddings,
        bucketed_min_tokens=None,
    )
    with Checkpoint.open(path) as checkpoint:
        model = load_encoder(config, checkpoint, placement)
    return EncoderParts(
        effective=effective,
        model=model,
        passes=ObservedPasses(config.num_layers, device, settings, pass_trace),
        tokenizer=Tokenizer.for_encoding(path),
        embedding=EmbeddingConfig.from_directory(path, size=config.hidden_size, default="mean"),
        max_model_len=settings.max_model_len,
    )
