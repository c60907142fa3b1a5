"""The function of a tool call, inside an assistant message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from worker.lines.given_model import GivenModel


def _arguments(value: object) -> Mapping[str, object]:
    """OpenAI writes arguments as JSON in a string, sometimes none as an empty one; templates want the object."""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_refuse_constant) if value else {}
        except (ValueError, RecursionError) as error:
            raise PydanticCustomError("invalid_value", "a JSON object in a string") from error
    if not isinstance(value, dict):
        raise PydanticCustomError("invalid_type", "a JSON object in a string")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


class CalledFunction(GivenModel):
    """Name and arguments of one call that the assistant made."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[Mapping[str, object], BeforeValidator(_arguments)]
