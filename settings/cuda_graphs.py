"""Capture of decode steps as CUDA graphs."""

from __future__ import annotations

from pydantic import BaseModel, Field

from settings.group_config import GROUP_CONFIG


class CudaGraphSettings(BaseModel):
    """Capture of decode steps as CUDA graphs."""

    model_config = GROUP_CONFIG

    enabled: bool = Field(default=False, description="Capture decode steps as CUDA graphs and replay them.")
