"""A decoder's weights without an engine around them."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.checkpoint.files import Checkpoint
from engine.models.decoder import DecoderModel
from engine.models.load import load_decoder
from engine.models.placement import ModelPlacement
from kernels.dispatch import operations
from tests.support.decoder_config import decoder_config

CPU = torch.device("cpu")


def load_alone(path: Path) -> DecoderModel:
    """In float32 on the CPU."""
    placement = ModelPlacement(CPU, torch.float32, operations(CPU), max_positions=64, bucketed_min_tokens=8)
    with Checkpoint.open(path) as checkpoint:
        return load_decoder(decoder_config(path), checkpoint, placement)
