"""An engine whose weights never were in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from engine.checkpoint.files import Checkpoint
from engine.engine import Engine
from engine.loading.derived_settings import derive_for
from engine.loading.load import load_decoder_parts
from settings import load_settings
from tests.benchmarks.gpu.gpu_model import GpuModel
from tests.benchmarks.gpu.random_shard import random_checkpoint
from tests.benchmarks.peers.checkpoints import write_tokenizer


def load_random(model: GpuModel, path: Path, device: torch.device, overrides: Mapping[str, object]) -> Engine:
    """Weights are made on the device; everything else of the checkpoint lies in `path`.

    Settings are the defaults but for the overrides, whatever this machine's environment says.
    """
    values = {"model.path": str(path), "engine.device": device.type, "engine.dtype": model.parsed.dtype, **overrides}
    effective = load_settings(values, environ={}, dotenv_path=Path(os.devnull))
    config = model.parsed

    def open_checkpoint(_: Path) -> Checkpoint:
        return random_checkpoint(config, device)

    derived = derive_for(effective, path, config, open_checkpoint)
    return Engine(load_decoder_parts(derived, path, config, open_checkpoint=open_checkpoint))


def write_model_directory(model: GpuModel, path: Path) -> None:
    """A checkpoint without weights: config.json, and a tokenizer that knows as many tokens as the published one."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(model.config, indent=1))
    write_tokenizer(path, model.tokenizer_size)
