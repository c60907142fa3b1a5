"""Reuse of KV blocks between requests that begin alike."""

from __future__ import annotations

from pydantic import BaseModel, Field

from settings.group_config import GROUP_CONFIG


class PrefixCacheSettings(BaseModel):
    """Reuse of KV blocks between requests that begin alike."""

    model_config = GROUP_CONFIG

    enabled: bool = Field(default=True, description="Requests that begin alike share the KV blocks of the beginning.")
