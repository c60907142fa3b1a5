"""config.json of either kind of model."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.common_config import MAX_CONFIG_BYTES
from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.json_file import read_json_object
from engine.checkpoint.model_config import MODEL_CLASSES, ModelConfig
from engine.errors import CheckpointError

ENCODER_TYPE = "bert"


def read_config(path: Path) -> ModelConfig | EncoderConfig:
    """A decoder's config or, where model_type says so, an encoder's, of which sentence_bert_config.json is a part.

    path: the model directory. Raises CheckpointError.
    """
    data = read_json_object(path / "config.json", max_bytes=MAX_CONFIG_BYTES)
    model_type = data.get("model_type")
    if model_type == ENCODER_TYPE:
        trained = path / "sentence_bert_config.json"
        return EncoderConfig.from_hf(
            data, read_json_object(trained, max_bytes=MAX_CONFIG_BYTES) if trained.exists() else {}
        )
    if model_type not in MODEL_CLASSES:
        accepted = ", ".join((*MODEL_CLASSES, ENCODER_TYPE))
        raise CheckpointError(f"config.json: model_type is {model_type!r}; accepted: {accepted}")
    return ModelConfig.from_hf(data)
