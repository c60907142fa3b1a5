"""The trained weights as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM


def export(model: Qwen3MoeForCausalLM, path: Path) -> None:
    """Round the weights to bfloat16, in the model itself too, and write them with their config into `path`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(path)
    (path / "model.safetensors").chmod(0o644)  # the library leaves it to its owner alone
    for parameter in model.parameters():  # computing in float32 with these weights is what they are good for
        parameter.data = parameter.data.float()
