"""From derived settings to a loaded, warmed-up encoder."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.checkpoint.encoder_config import EncoderConfig
from engine.embedding.encoder_executor import EncoderExecutor
from engine.errors import EngineFatal
from engine.execution.pass_trace import PassTrace
from engine.loading.encoder_parts import EncoderParts
from engine.loading.prepare_placement import prepare_placement
from engine.models.load_encoder import load_encoder
from engine.out_of_memory import WEIGHTS_ADVICE, naming_settings
from engine.text.tokenizer import Tokenizer
from settings import EffectiveSettings


def load_encoder_parts(
    effective: EffectiveSettings, path: Path, config: EncoderConfig, pass_trace: PassTrace | None
) -> EncoderParts:
    """Load everything an encoder's engine needs, and warm up. effective: fully derived.

    Forward passes that engine.profile selects go into `pass_trace`, the warm-up's too. Raises CheckpointError,
    NonFiniteLogits, CapabilityError (memory ran out).
    """
    settings = effective.settings.engine
    if settings.max_model_len is None:
        raise EngineFatal("derive_settings left engine.max_model_len unset")
    placement = prepare_placement(settings, max_positions=config.max_position_embeddings)
    with Checkpoint.open(path) as checkpoint, naming_settings("the weights", checkpoint.total_bytes, WEIGHTS_ADVICE):
        model = load_encoder(config, checkpoint, placement)
    executor = EncoderExecutor(model, settings, pass_trace)
    executor.warm_up()
    return EncoderParts(
        effective=effective,
        executor=executor,
        tokenizer=Tokenizer.for_encoding(path),
        embedding=EmbeddingConfig.from_directory(path, size=config.hidden_size, default="mean"),
        max_model_len=settings.max_model_len,
    )
