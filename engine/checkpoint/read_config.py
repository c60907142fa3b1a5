"""config.json of either kind of model."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.json_file import read_json_object
from engine.checkpoint.model_config import MAX_CONFIG_BYTES, MODEL_CLASSES, ModelConfig
from engine.errors import CheckpointError

ENCODER_TYPE = "bert"


def read_config(path: Path) -> ModelConfig | EncoderConfig:
    """A decoder's config, or an encoder's where model_type says so. Raises CheckpointError."""
    model_type = read_json_object(path / "config.json", max_bytes=MAX_CONFIG_BYTES).get("model_type")
    if model_type == ENCODER_TYPE:
        return EncoderConfig.from_directory(path)
    if model_type not in MODEL_CLASSES:
        accepted = ", ".join((*MODEL_CLASSES, ENCODER_TYPE))
        raise CheckpointError(f"config.json: model_type is {model_type!r}; accepted: {accepted}")
    return ModelConfig.from_directory(path)
