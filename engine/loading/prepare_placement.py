"""Where and how a model runs, as the settings ask for it."""

from __future__ import annotations

import torch

from engine.errors import EngineFatal
from engine.loading.choose_operations import choose_operations
from engine.loading.dtypes import DTYPES
from engine.loading.matmul_precision import require_float32_sums
from engine.models.model_placement import ModelPlacement
from settings import EngineSettings


def prepare_placement(settings: EngineSettings, *, max_positions: int) -> ModelPlacement:
    """Set this process's threads and the precision of its sums, and say where the model goes.

    settings: fully derived. max_positions: tokens of the longest sequence. Raises KernelsUnavailable.
    """
    if settings.num_threads is None:
        raise EngineFatal("derive_settings left engine.num_threads unset")
    torch.set_num_threads(settings.num_threads)
    require_float32_sums()
    device = torch.device(settings.device)
    return ModelPlacement(
        device=device,
        dtype=DTYPES[settings.dtype],
        ops=choose_operations(settings, device),
        max_positions=max_positions,
        bucketed_min_tokens=settings.moe.bucketed_min_tokens if settings.moe.bucketed else None,
    )
