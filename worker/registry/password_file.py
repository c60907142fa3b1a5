"""A file that holds a password and nothing else."""

from __future__ import annotations

from pathlib import Path

MAX_PASSWORD_BYTES = 512


def read_password_line(file: Path) -> str | None:
    """The file's one line without its end; None where it is empty, longer than 512 bytes, or not one line of text.

    Raises OSError; ValueError for what is not UTF-8. No message quotes what the file holds.
    """
    with file.open("rb") as stream:
        data = stream.read(MAX_PASSWORD_BYTES + 1)
    try:
        line = data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    return line if line and line.isprintable() and len(data) <= MAX_PASSWORD_BYTES else None
