"""Reads a tool call that is written as Python writes one, `weather(city="Rome", days=2)`, and spells it in JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

MAX_DEPTH = 64  # of lists and objects in one another: no arguments are nested so far

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"([^\s()\[\]{}'\",=]+)\s*\(")
_KEY = re.compile(r"([^\s()\[\]{}'\",=]+)\s*=")
_TEXT = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"(True|False|None|true|false|null)\b")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
# Python's but for \a, \v, \N{...} and octal ones, and JSON's; any other stays as it is written.
_ESCAPED: Mapping[str, str] = MappingProxyType(
    {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/"}
)
_WORDS: Mapping[str, str] = MappingProxyType({"True": "true", "False": "false", "None": "null"})

Element = Callable[[str, int], tuple[str, int]]  # text and where it begins -> its JSON, and where it ends


def read_python_call(text: str, start: int) -> tuple[str, str, int]:
    """The name, the arguments as a JSON object, and where the call that begins at `text[start]` ends.

    Arguments are named; values are texts, numbers, lists, objects, and true, false and nothing as Python or JSON have
    them. Numbers keep their spelling. Raises ValueError for anything else.
    """
    name = _NAME.match(text, start)
    if name is None:
        raise ValueError("no call")
    keys: set[str] = set()

    def argument(text: str, start: int) -> tuple[str, int]:
        key = _KEY.match(text, start)
        if key is None or key[1] in keys:
            raise ValueError("no name of an argument, or one twice")
        keys.add(key[1])
        value, end = _value(text, _after_space(text, key.end()), 0)
        return f"{json.dumps(key[1], ensure_ascii=False)}: {value}", end

    arguments, end = _listed(text, name.end(), ")", argument)
    return name[1], f"{{{arguments}}}", end


def _listed(text: str, start: int, close: str, element: Element) -> tuple[str, int]:
    """Elements with commas between, perhaps one behind the last, up to `close`; and what follows that."""
    found: list[str] = []
    position = _after_space(text, start)
    while not text.startswith(close, position):
        each, position = element(text, position)
        found.append(each)
        position = _after_space(text, position)
        if text.startswith(",", position):
            position = _after_space(text, position + 1)
        elif not text.startswith(close, position):
            raise ValueError(f"no {close}")
    return ", ".join(found), position + len(close)


def _value(text: str, start: int, depth: int) -> tuple[str, int]:
    if depth > MAX_DEPTH:
        raise ValueError("nested as no call is")

    def value(text: str, start: int) -> tuple[str, int]:
        return _value(text, start, depth + 1)

    def member(text: str, start: int) -> tuple[str, int]:
        key, end = _text(text, start)
        end = _after_space(text, end)
        if not text.startswith(":", end):
            raise ValueError("no :")
        found, end = value(text, _after_space(text, end + 1))
        return f"{key}: {found}", end

    if text.startswith("[", start):
        found, end = _listed(text, start + 1, "]", value)
        return f"[{found}]", end
    if text.startswith("{", start):
        found, end = _listed(text, start + 1, "}", member)
        return f"{{{found}}}", end
    if text.startswith(("'", '"'), start):
        return _text(text, start)
    scalar = _WORD.match(text, start) or _NUMBER.match(text, start)
    if scalar is None:
        raise ValueError("no value")
    return _WORDS.get(scalar[0], scalar[0]), scalar.end()


def _text(text: str, start: int) -> tuple[str, int]:
    found = _TEXT.match(text, start)
    if found is None:
        raise ValueError("no text")
    body = _ESCAPE.sub(_unescaped, found[1] if found[1] is not None else found[2])
    # Two escapes of JSON may be one character. Half of one, which no record can hold, raises a ValueError.
    body = body.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    return json.dumps(body, ensure_ascii=False), found.end()


def _unescaped(escape: re.Match[str]) -> str:
    kind = escape[1]
    if len(kind) == 1:
        return _ESCAPED.get(kind, escape[0])
    code = int(kind[1:], 16)
    if code > sys.maxunicode:
        raise ValueError("no character")
    return chr(code)


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()
