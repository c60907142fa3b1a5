"""Reads the small files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from engine.errors import CheckpointError


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, object]:
    """The JSON object in `path`, which may hold `max_bytes` at most.

    Raises CheckpointError naming the file if it is absent, too large, not JSON or not an object.
    """
    try:
        data = json.loads(read_text(path, max_bytes=max_bytes))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(data).__name__}; accepted: an object")
    return data


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
