"""The one function that must be called."""

from __future__ import annotations

from typing import Literal

from worker.lines.body_model import BodyModel
from worker.lines.named_function import NamedFunction


class ToolChoice(BodyModel):
    """`tool_choice` as an object."""

    type: Literal["function"]
    function: NamedFunction
