"""A model of shapes."""

from __future__ import annotations

import torch

from engine.models.model_placement import ModelPlacement
from kernels import reference

# For a checkpoint that is only to be checked: nothing takes memory, and the reference keeps weights as they are.
SHAPES_ONLY = ModelPlacement(
    device=torch.device("meta"), dtype=torch.float32, ops=reference, max_positions=1, bucketed_min_tokens=None
)
