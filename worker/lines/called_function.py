"""The function of a tool call, inside an assistant message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from settings import LimitSettings
from worker.lines.given_model import GivenModel
from worker.lines.json_in_string import json_in_string


def _arguments(value: object, info: ValidationInfo[LimitSettings]) -> Mapping[str, object]:
    """OpenAI writes arguments as JSON in a string, sometimes none as an empty one; templates want the object."""
    if isinstance(value, str):
        value = json_in_string(value, info, "a JSON object in a string") if value else {}
    if not isinstance(value, dict):
        raise PydanticCustomError("invalid_type", "a JSON object in a string")
    return value


class CalledFunction(GivenModel):
    """Name and arguments of one call that the assistant made."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[Mapping[str, object], BeforeValidator(_arguments)]
