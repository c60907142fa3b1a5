"""How decode steps run."""

from __future__ import annotations

from pydantic import BaseModel, Field

from settings.group_config import GROUP_CONFIG
from settings.units import Sequences


class DecodeSettings(BaseModel):
    """How decode steps run."""

    model_config = GROUP_CONFIG

    batched: bool = Field(
        default=True, description="Decode many sequences in one forward pass; off: one after the other, to compare."
    )
    batch_threshold: Sequences = Field(
        default=2, ge=1, le=65_536, description="Fewest sequences that are decoded in one forward pass."
    )
