"""One tool call, written as a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from worker.answers.called_tool import CalledTool
from worker.lines.strict_json import has_surrogate

_ARGUMENTS = ("arguments", "parameters")  # Qwen3's word, Llama 3's word
_SPACE = re.compile(r"[ \t\n\r]*")


def read_call(text: str, start: int, names: Collection[str]) -> tuple[CalledTool, int] | None:
    """The call whose object begins at `text[start]`, and where it ends; None if there is no call of one of `names`.

    Arguments keep the model's own spelling: written anew, 1e999 would become Infinity, which is no JSON.
    """
    try:
        members, end = _members(text, start)
    except (ValueError, RecursionError):  # no JSON, or nested as no call is
        return None
    name, _ = members.get("name", (None, ""))
    given = [members[key] for key in _ARGUMENTS if key in members]
    if not isinstance(name, str) or name not in names or len(given) != 1:
        return None
    arguments = arguments_text(*given[0])
    return None if arguments is None else (CalledTool(name, arguments), end)


def arguments_text(value: object, spelling: str) -> str | None:
    """The arguments as JSON text: an object, or, as some models write it, a string that holds one; else None.

    None too for a string with half a surrogate pair, which no record can hold: in the text it is still escaped.
    """
    if isinstance(value, str):
        if has_surrogate(value):
            return None
        spelling, value = value, whole_value(value)
    return spelling if isinstance(value, dict) else None


def whole_value(text: str) -> object:
    """The JSON value that `text` is, white space around it aside; None if it is none."""
    try:
        value, end = _decoder().raw_decode(text, after_space(text, 0))
    except (ValueError, RecursionError):
        return None
    return value if after_space(text, end) == len(text) else None


def after_space(text: str, position: int) -> int:
    """The next position that is no JSON white space."""
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def _members(text: str, start: int) -> tuple[dict[str, tuple[object, str]], int]:
    """Key -> (value, its spelling) of the object at `start`, and where it ends. Raises ValueError, RecursionError."""
    decoder = _decoder()
    found: dict[str, tuple[object, str]] = {}
    position = after_space(text, _expect(text, start, "{"))
    if text.startswith("}", position):
        return found, position + 1
    while True:
        key, position = decoder.raw_decode(text, position)
        if not isinstance(key, str) or key in found:
            raise ValueError("not a key, or a key twice")
        begin = after_space(text, _expect(text, after_space(text, position), ":"))
        value, position = decoder.raw_decode(text, begin)
        found[key] = value, text[begin:position]
        position = after_space(text, position)
        if text.startswith("}", position):
            return found, position + 1
        position = after_space(text, _expect(text, position, ","))


def _expect(text: str, position: int, mark: str) -> int:
    if not text.startswith(mark, position):
        raise ValueError(f"no {mark}")
    return position + 1


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
