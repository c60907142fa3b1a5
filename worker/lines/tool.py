"""A tool the model is told about."""

from __future__ import annotations

from typing import Literal

from worker.lines.body_model import BodyModel
from worker.lines.tool_function import ToolFunction


class Tool(BodyModel):
    """One tool, rendered into the prompt by the model's chat template."""

    type: Literal["function"]
    function: ToolFunction
