"""Schemas and choices as the text that a grammar is made of."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BeforeValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from settings import LimitSettings
from worker.lines.json_in_string import json_in_string


def _schema_text(value: object, info: ValidationInfo[LimitSettings]) -> str:
    """A JSON schema, as an object or as JSON in a string (vLLM takes both), as JSON text in its own key order."""
    if isinstance(value, str):
        value = json_in_string(value, info, "a JSON schema, an object")
    if not isinstance(value, dict):
        raise PydanticCustomError("invalid_type", "a JSON schema, an object")
    return _json(value)


def _choices_text(value: object) -> str:
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("invalid_type", "a list of one string or more")
    for position, choice in enumerate(value):
        if not isinstance(choice, str):
            raise PydanticCustomError("invalid_type", "a string", {"at": position})
        if not choice:
            raise PydanticCustomError("invalid_value", "a string that is not empty", {"at": position})
    return _json(list(dict.fromkeys(value)))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


SchemaText = Annotated[str, BeforeValidator(_schema_text)]
ChoicesText = Annotated[str, BeforeValidator(_choices_text)]
