"""The configuration of a checkpoint that is a decoder's."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.model_config import ModelConfig, read_config


def decoder_config(path: Path) -> ModelConfig:
    """That of config.json in a model directory."""
    config = read_config(path)
    assert isinstance(config, ModelConfig)
    return config
