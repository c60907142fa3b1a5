"""A function by its name."""

from __future__ import annotations

from worker.lines.body_model import BodyModel
from worker.lines.tool_function import FunctionName


class NamedFunction(BodyModel):
    """A function that stands in `tools`."""

    name: FunctionName
