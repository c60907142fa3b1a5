"""How mixture-of-experts layers run."""

from __future__ import annotations

from pydantic import BaseModel, Field

from settings.group_config import GROUP_CONFIG
from settings.units import Tokens


class MoeSettings(BaseModel):
    """How mixture-of-experts layers run."""

    model_config = GROUP_CONFIG

    bucketed: bool = Field(
        default=True, description="Sort tokens by expert and multiply once per expert; off: token by token, to compare."
    )
    bucketed_min_tokens: Tokens = Field(
        default=4, ge=1, le=1_048_576, description="Fewest tokens in a step that are sorted by expert."
    )
