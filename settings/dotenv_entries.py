"""Settings in a `.env` file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from dotenv.parser import parse_stream

from settings.entry import Entry
from settings.environment_entries import is_ours
from settings.errors import SettingsError
from settings.masking import show
from settings.source import ENV_PREFIX, Source
from settings.text_file import read_text_file


def dotenv_entries(path: Path) -> Iterator[Entry]:
    """The variables of a `.env` file that are meant for us, in its order; others' variables are left to them.

    python-dotenv's parser is used without its loader, which skips lines it cannot read and replaces `${NAME}` from
    the environment. Raises SettingsError for an unreadable file, an unreadable line that names us, a name without a
    value and a name set twice.
    """
    first_line: dict[str, int] = {}
    for binding in parse_stream(io.StringIO(read_text_file(path), newline="")):
        # The parser counts from the line after the previous binding, so blank lines before a name are skipped here.
        text = binding.original.string
        line = binding.original.line + text[: len(text) - len(text.lstrip())].count("\n")
        place = f"{path}:{line}"
        if binding.error:
            if ENV_PREFIX in text.upper():
                raise SettingsError(show(place), None, "this line cannot be read", accepted="NAME=value")
            continue
        name = binding.key
        if name is None or not is_ours(name):
            continue
        entry = Entry(Source.DOTENV, name, binding.value, place)
        if binding.value is None:
            raise SettingsError(entry.written, None, "no value", accepted="NAME=value")
        if name in first_line:
            raise SettingsError(entry.written, None, f"set twice; the first time on line {first_line[name]}")
        first_line[name] = line
        yield entry
