"""The function of a tool."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from worker.lines.body_model import BodyModel

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _function_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise PydanticCustomError("invalid_value", "1 to 64 letters, digits, _ and - (ASCII)")
    return name


FunctionName = Annotated[str, AfterValidator(_function_name)]  # OpenAI's rule


class ToolFunction(BodyModel):
    """What a function is called, what it is for and which arguments it takes."""

    name: FunctionName
    description: str | None = None
    parameters: Mapping[str, object] | None = None  # a JSON Schema of an object; none: no arguments
    strict: bool | None = None
