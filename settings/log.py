"""What is logged, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from settings.group_config import GROUP_CONFIG


class LogSettings(BaseModel):
    """What is logged, and how. Logs go to standard error."""

    model_config = GROUP_CONFIG

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe event that is logged."
    )
    format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: console where standard error is a terminal, else json."
    )
