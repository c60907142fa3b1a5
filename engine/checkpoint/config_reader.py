"""Reads a checkpoint's JSON files and checks the type and range of their keys."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from engine.errors import CheckpointError

DtypeName = Literal["float32", "bfloat16", "float16"]

DTYPES = ("float32", "bfloat16", "float16")
NO_CODE = "null: code from a checkpoint is never run"
MAX_CONFIG_BYTES = 1 << 20  # published configuration files are below 10 KB


class ConfigReader:
    """Reads keys of one JSON object and raises CheckpointError naming file, key, value and what is accepted.

    A key that is null counts as absent, as in transformers. A key without a default must be there.
    """

    def __init__(self, data: Mapping[str, object], source: str) -> None:
        self.data = data
        self.source = source  # what messages call the object: "config.json", "config.json: rope_parameters"

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        accepted = f"a whole number, at least {minimum}"
        return cast(int, self._value(key, default, accepted, lambda value: _is_whole(value, minimum)))

    def number(self, key: str, *, default: float | None = None) -> float:
        """A finite number above 0."""
        return float(cast(float, self._value(key, default, "a number above 0", _is_positive)))

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """true or false."""
        return cast(bool, self._value(key, default, "true or false", lambda value: isinstance(value, bool)))

    def choice(self, key: str, accepted: tuple[str, ...], *, default: str | None = None) -> str:
        """One of the strings in `accepted`."""
        return cast(str, self._value(key, default, ", ".join(accepted), lambda value: value in accepted))

    def integers(self, key: str, *, minimum: int = 0) -> list[int]:
        """A list of whole numbers, each at least `minimum`; an absent key is an empty list."""
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(_is_whole(item, minimum) for item in value):
            raise self.refuse(key, value, f"a list of whole numbers, each at least {minimum}")
        return value

    def numbers(self, key: str, *, count: int) -> tuple[float, ...]:
        """A list of so many finite numbers above 0."""
        accepted = f"a list of {count} numbers above 0"

        def is_accepted(value: object) -> bool:
            return isinstance(value, list) and len(value) == count and all(map(_is_positive, value))

        return tuple(map(float, cast("list[float]", self._value(key, None, accepted, is_accepted))))

    def table(self, key: str) -> ConfigReader | None:
        """The object under `key`, or None if absent."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, value, "an object or null")
        return ConfigReader(value, f"{self.source}: {key}")

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.data.get(key) is not None

    def first_of(self, new: str, old: str) -> str:
        """The name of a key that is in use, its new or its old one. Raises CheckpointError where the two differ."""
        if self.has(new) and self.has(old) and self.data[new] != self.data[old]:
            raise CheckpointError(
                f"{self.source}: {new} is {self.data[new]!r} and {old}, its older name, is {self.data[old]!r}"
            )
        return new if self.has(new) or not self.has(old) else old

    def refuse(self, key: str, value: object, accepted: str) -> CheckpointError:
        """The error for a value that cannot be run."""
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:200] + "..."
        return CheckpointError(f"{self.source}: {key} is {shown}; accepted: {accepted}")

    def _value(self, key: str, default: object, accepted: str, is_accepted: Callable[[object], bool]) -> object:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.source}: {key} is missing; accepted: {accepted}")
        if not is_accepted(value):
            raise self.refuse(key, value, accepted)
        return value


def _is_whole(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < math.inf


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, object]:
    """The JSON object in `path`, which may hold `max_bytes` at most.

    Raises CheckpointError naming the file if it is absent, too large, not JSON or not an object.
    """
    data = read_json(path, max_bytes=max_bytes)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(data).__name__}; accepted: an object")
    return data


def read_json(path: Path, *, max_bytes: int) -> object:
    """What the JSON in `path` says. Raises CheckpointError naming the file."""
    try:
        return json.loads(read_text(path, max_bytes=max_bytes))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error


def read_text(path: Path, *, max_bytes: int) -> str:
    """The UTF-8 text in `path`, which may hold `max_bytes` at most. Raises CheckpointError naming the file."""
    check_size(path, max_bytes=max_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not valid UTF-8: {error}") from error


def check_size(path: Path, *, max_bytes: int) -> None:
    """Raises CheckpointError if `path` is not a file of at most `max_bytes`: it is read into memory whole."""
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    size = path.stat().st_size
    if size > max_bytes:
        raise CheckpointError(f"{path}: {size} bytes; accepted: at most {max_bytes}")


def weights_dtype(config: ConfigReader, *, default: DtypeName | None = None) -> DtypeName:
    """The dtype of the weights on disk. Raises CheckpointError for an unknown one, or for none without a default."""
    return cast(DtypeName, config.choice(config.first_of("dtype", "torch_dtype"), DTYPES, default=default))


def refuse_unsupported(config: ConfigReader, *, absent: Mapping[str, str], false: Sequence[str]) -> None:
    """Raises CheckpointError for a key of `absent` (key -> what is accepted) that is there, one of `false` that is not
    false.
    """
    for key, accepted in absent.items():
        if config.has(key):
            raise config.refuse(key, config.data[key], accepted)
    for key in false:
        if config.flag(key, default=False):
            raise config.refuse(key, True, "false")
