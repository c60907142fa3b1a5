"""Settings in a TOML profile."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from settings.entry import Entry
from settings.errors import SettingsError
from settings.masking import show
from settings.source import Source
from settings.text_file import read_text_file

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def profile_entries(path: Path, keys: Collection[str]) -> Iterator[Entry]:
    """The values of a TOML file, with the names of their tables: `block_size` in `[kv_cache]` is kv_cache.block_size.

    `keys` are those of the settings, below which nothing is a table. Raises SettingsError for a file that cannot be
    read or is not TOML.
    """
    text = read_text_file(path)
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "nested too deeply"
        raise SettingsError(show(str(path)), None, f"not TOML: {reason}") from error
    yield from _flatten(data, "", str(path), keys)


def _flatten(table: Mapping[str, object], prefix: str, place: str, keys: Collection[str]) -> Iterator[Entry]:
    for name, value in table.items():
        # A quoted "a.b" is one name with a dot in it, not a path; the quotes keep the two apart.
        key = prefix + (name if _BARE_KEY.fullmatch(name) else f'"{name}"')
        inside = any(known.startswith(f"{key}.") for known in keys)
        # A filled table of an unknown name is walked too, so that the error names a setting, not the table.
        if isinstance(value, dict) and (inside or (value and key not in keys)):
            yield from _flatten(value, f"{key}.", place, keys)
        else:
            yield Entry(Source.PROFILE, key, value, place)
