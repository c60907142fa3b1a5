"""A tool that the assistant may call."""

from __future__ import annotations

from typing import Literal

from worker.lines.given_model import GivenModel
from worker.lines.tool_function import ToolFunction


class Tool(GivenModel):
    """A function on offer. Reaches the chat template as the line had it, key order included."""

    type: Literal["function"]
    function: ToolFunction
