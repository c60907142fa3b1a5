"""The function a tool offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from worker.lines.body_model import BodyModel


class ToolFunction(BodyModel):
    """Name, purpose and JSON schema of a function the model may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    strict: Literal[False] | None = None  # true would promise schema-constrained arguments
