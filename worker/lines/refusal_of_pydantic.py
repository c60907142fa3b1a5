"""The one place where pydantic's errors become ours."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from worker.lines.body_model import BodyModel
from worker.lines.refusal_error import RefusalError
from worker.lines.shorten import shorten

_PREFIX = "Input should be "
_ACCEPTED = {
    "int_type": "a whole number",
    "float_type": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "mapping_type": "an object",
    "none_required": "null",
    "too_long": "an empty list",
}
_OWN_CODES = frozenset({"invalid_type", "invalid_value", "empty_prompt"})


def refusal_of_pydantic(error: ValidationError, model: type[BodyModel]) -> RefusalError:
    """The first fault that pydantic found, as parameter path, value and what is accepted."""
    details = error.errors(include_url=False)
    first = details[0]
    context: Mapping[str, object] = first.get("ctx", {})
    location = tuple(part for part in first["loc"] if not _is_union_tag(part))
    if "at" in context:
        at = context["at"]
        location = (*location, at if isinstance(at, int) else str(at))
    param = _path(location)
    if first["type"] == "extra_forbidden":
        return _unknown(param, str(location[-1]), model if len(location) == 1 else None)
    if first["type"] == "missing":
        return RefusalError(f"{param} is missing", code="missing_parameter", param=param)
    value = context.get("value", shorten(_value_at(first, context)))
    return RefusalError(f"{param} is {value}; accepted: {_accepted(first)}", code=_code(first["type"]), param=param)


def _value_at(details: ErrorDetails, context: Mapping[str, object]) -> object:
    value, at = details["input"], context.get("at")
    if isinstance(value, dict) and isinstance(at, str):
        return value.get(at)
    if isinstance(value, list | tuple) and isinstance(at, int):
        return value[at]
    return getattr(value, at, None) if isinstance(value, BodyModel) and isinstance(at, str) else value


def _unknown(param: str, name: str, model: type[BodyModel] | None) -> RefusalError:
    near = difflib.get_close_matches(name, model.model_fields, n=1) if model else []
    hint = f"; did you mean {near[0]}?" if near else ""
    return RefusalError(f"unknown parameter {shorten(param)}{hint}", code="unknown_parameter", param=param)


def _accepted(details: ErrorDetails) -> str:
    return _ACCEPTED.get(details["type"]) or details["msg"].removeprefix(_PREFIX)


def _code(error_type: str) -> str:
    if error_type in _OWN_CODES:
        return error_type
    return "invalid_type" if error_type.endswith(("_type", "_required")) else "invalid_value"


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
