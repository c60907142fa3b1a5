"""Reads JSON as its standard has it, and refuses the faults that Python's reader lets pass."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice

from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

from settings import LimitSettings
from worker.lines.errors import RefusalError

# A whole string (also an unfinished one, so that no quote is scanned twice) or one bracket.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")

MAX_QUOTED_CHARS = 80


def read_strict_json(raw: bytes, max_depth: int) -> StrictJson:
    """Parse one UTF-8 JSON text.

    Refused here: invalid UTF-8, anything json.loads refuses, more than `max_depth` nested arrays and objects.
    Faults that leave a readable value are told by `StrictJson.faults`. Raises RefusalError.
    """
    _check_depth(raw, max_depth)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"line is not valid UTF-8: {error.reason} at byte {error.start + 1}") from error
    if text.startswith("\ufeff"):
        raise _invalid("line begins with a byte order mark; save the file as UTF-8 without one")
    result = StrictJson(may_hold_surrogates=b"\\ud" in raw or b"\\uD" in raw)
    try:
        result.decode(text)
    except json.JSONDecodeError as error:
        # Some of json's messages end in "at": "Unterminated string starting at".
        message = f"line is not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        raise _invalid(message) from error
    except ValueError as error:  # the one other fault: Python limits whole numbers to 4300 digits
        raise _invalid("line holds a whole number of more than 4300 digits") from error
    return result


class StrictJson:
    """A parsed text, with the faults that json's hooks saw but could not place: they are told no path."""

    def __init__(self, *, may_hold_surrogates: bool) -> None:
        self.value: object = None
        self._suspicious = may_hold_surrogates
        self._repeated_keys: deque[str] | None = None  # the outermost first; None: there are none

    def decode(self, text: str) -> None:
        """Fill `value`. Raises ValueError."""
        try:
            self.value = _PLAIN_DECODER.decode(text)
            return
        except _IsNotPlain:
            self._repeated_keys = deque(maxlen=RefusalError.most_told + 1)
        decoder = json.JSONDecoder(object_pairs_hook=self._object, parse_float=self._float, parse_constant=self._float)
        self.value = decoder.decode(text)

    def faults(self) -> list[RefusalError]:
        """A key twice in one object, NaN, Infinity, what overflows to it, lone surrogates: as many as are told."""
        repeated = self._repeated_keys or ()
        faults = [_invalid(f"key {shorten(key)} appears twice in one object", key) for key in repeated]
        if self._suspicious:
            faults += islice(_faults_of_values(self.value), RefusalError.most_told + 1)
        return faults

    def check(self) -> None:
        """Raise RefusalError if there are faults."""
        if faults := self.faults():
            raise RefusalError.of_all(faults)

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs) and self._repeated_keys is not None:
            keys = Counter(key for key, _ in pairs)
            self._repeated_keys.extendleft(reversed([key for key, count in keys.items() if count > 1]))
        return found

    def _float(self, text: str) -> float:
        number = float(text)
        self._suspicious = self._suspicious or not math.isfinite(number)
        return number


class _IsNotPlain(Exception):
    """A text has a repeated key, or a number that is not finite: what exactly is looked at in a second reading."""


def _plain_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _IsNotPlain
    return found


def _plain_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _IsNotPlain
    return number


# Made once: a decoder a line with hooks of its own took twice the time.
_PLAIN_DECODER = json.JSONDecoder(
    object_pairs_hook=_plain_object, parse_float=_plain_float, parse_constant=_plain_float
)


def _check_depth(raw: bytes, max_depth: int) -> None:
    """Refuse deep nesting before json recurses into it. Linear in the line's length."""
    if raw.count(b"[") + raw.count(b"{") <= max_depth:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(raw):
        token = match.group()
        if token in (b"[", b"{"):
            depth += 1
            if depth > max_depth:
                raise _invalid(f"line nests arrays and objects deeper than {max_depth} levels")
        elif token in (b"]", b"}"):
            depth -= 1


def _faults_of_values(value: object) -> Iterator[RefusalError]:
    for path, leaf in _leaves(value, ""):
        param = path.removeprefix("body.")  # params are paths inside the body
        if isinstance(leaf, str) and has_surrogate(leaf):
            fault = "holds a lone surrogate; accepted: valid Unicode text"
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            fault = f"is {leaf}; accepted: a finite number"
        else:
            continue
        yield RefusalError(f"{param or 'line'} {fault}", code="invalid_value", param=param or None)


def has_surrogate(text: str) -> bool:
    """Whether `text` holds half of a surrogate pair, which no encoding can write."""
    return _SURROGATE.search(text) is not None


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Every key and every scalar with its path; the depth is already bounded."""
    if isinstance(value, dict):
        for key, item in value.items():
            inner = f"{path}.{key}" if path else str(key)
            yield inner, key
            yield from _leaves(item, inner)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _leaves(item, f"{path}[{position}]")
    else:
        yield path, value


def _invalid(message: str, param: str | None = None) -> RefusalError:
    return RefusalError(message, code="invalid_json_line", param=param)


def json_in_string(text: str, info: ValidationInfo[LimitSettings], accepted: str) -> object:
    """The value of `text`, read as strictly as the line around it and with the same limit of depth.

    The validation's context is the line's LimitSettings. Raises PydanticCustomError, which names `accepted`.
    """
    limits = info.context
    try:
        parsed = read_strict_json(text.encode("utf-8", "surrogatepass"), limits.max_json_depth)
        parsed.check()
    except RefusalError as refusal:
        how = f"JSON of at most {limits.max_json_depth} levels (limits.max_json_depth)"
        accepted = f"{accepted}, as {how}, no key twice in an object, finite numbers"
        raise PydanticCustomError("invalid_value", "{accepted}", {"accepted": accepted}) from refusal
    return parsed.value


def shorten(value: object) -> str:
    """`value` as ASCII JSON, cut to 80 characters: an error record must not carry a whole prompt."""
    if isinstance(value, str):
        value = value[: MAX_QUOTED_CHARS + 1]
    elif isinstance(value, list | tuple):
        value = list(value[:MAX_QUOTED_CHARS])
    elif isinstance(value, int) and abs(value) >= 10**MAX_QUOTED_CHARS:
        return f"a whole number of {value.bit_length()} bits"
    text = json.dumps(value, default=repr)
    return text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 3] + "..."
