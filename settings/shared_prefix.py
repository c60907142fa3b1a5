"""Attention over beginnings that running requests share."""

from __future__ import annotations

from pydantic import BaseModel, Field

from settings.group_config import GROUP_CONFIG


class SharedPrefixSettings(BaseModel):
    """Attention over beginnings that running requests share."""

    model_config = GROUP_CONFIG

    enabled: bool | None = Field(
        default=None,
        description="Requests that run together over the same KV blocks attend to them once for all, where that is "
        "faster; none: on a CPU, without engine.deterministic.",
    )
