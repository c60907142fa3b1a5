"""The places that settings are read from, each a source of pydantic-settings.

pydantic-settings merges them, strongest first. Its own sources are not used: they skip a name they do not know, a line
of `.env` they cannot read and a file that is missing, replace `${NAME}` in `.env`, read a variable named like a group
as JSON, and cannot say where a value came from.
"""

from __future__ import annotations

import io
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dotenv.parser import parse_stream
from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

from settings.catalogue import Catalogue, Settings
from settings.entries import ENV_PREFIX, PROFILE_VARIABLE, Entry, Origin, Source
from settings.errors import SettingsError
from settings.fields import show
from settings.refusals import read_entry

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class SettingsSource(PydanticBaseSettingsSource):
    """One place that settings are written in, and which of them came from there.

    It reads its text when it is made, so that an unreadable file is reported before a wrong value. `Settings` calls it,
    which checks every value, also those that a stronger source overrides and that would matter once that one is gone.
    """

    def __init__(self, entries: Iterable[Entry], decided: Collection[str] = ()) -> None:
        """`decided`: keys whose values are checked here but not set."""
        super().__init__(Settings)
        self.origins: dict[str, Origin] = {}  # by dotted key; filled by the call
        self._entries = tuple(entries)
        self._decided = decided

    def __call__(self) -> dict[str, Any]:
        """The values of this source, nested as the settings are. Raises SettingsError for the first wrong one."""
        tree: dict[str, Any] = {}
        for entry in self._entries:
            spec, value = read_entry(entry)
            if spec.key in self._decided:
                continue
            self.origins[spec.key] = Origin(entry.source, entry.written, value)
            *groups, name = spec.key.split(".")
            table = tree
            for group in groups:
                table = table.setdefault(group, {})
            table[name] = value
        return tree

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The values of one group. The base class demands it; `Settings` calls the whole source instead."""
        return self().get(field_name), field_name, False


class CommandLineSource(SettingsSource):
    """`--set` options, or what a Python caller gives for them: values by dotted key."""

    def __init__(self, overrides: Mapping[str, object]) -> None:
        super().__init__(Entry(Source.COMMAND_LINE, key, raw) for key, raw in overrides.items())


class _VariableSource(SettingsSource):
    """Variables with our prefix; the one that names the profile is set apart."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        entries = tuple(entries)
        super().__init__(entry for entry in entries if entry.name != PROFILE_VARIABLE)
        self.profile = next((entry for entry in entries if entry.name == PROFILE_VARIABLE), None)


class EnvironmentSource(_VariableSource):
    """Environment variables with our prefix, in the order of their names."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(Entry(Source.ENVIRONMENT, name, environ[name]) for name in sorted(environ) if _is_ours(name))


class DotEnvSource(_VariableSource):
    """The variables of a `.env` file, in its order; of `./.env`, if there is one, where no path is given."""

    def __init__(self, path: Path | None) -> None:
        default = Path(".env")
        path = path or (default if default.is_file() else None)
        super().__init__(() if path is None else _dotenv_entries(path))


class ProfileSource(SettingsSource):
    """The values of a TOML file: of `path`, else of the one that a variable names, else none.

    Raises SettingsError for a file that cannot be read or is not TOML.
    """

    def __init__(self, path: Path | None, variable: Entry | None) -> None:
        if path is not None or variable is None:
            super().__init__(() if path is None else _profile_entries(path))
            return
        if variable.raw == "":
            raise SettingsError(variable.written, "''", "", accepted="the path of a TOML file")
        # Name the variable as well as the missing file: neither alone says what to correct.
        try:
            super().__init__(_profile_entries(Path(str(variable.raw))))
        except SettingsError as error:
            raise SettingsError(variable.written, None, str(error)) from error


class DerivedSource(SettingsSource):
    """What the engine found out from the machine and the checkpoint, for keys that are not yet `decided`.

    It goes before the other sources, since it fills in what one of them set to `auto` or none.
    """

    def __init__(self, derived: Mapping[str, object], decided: Collection[str], *, is_estimate: bool) -> None:
        source = Source.ESTIMATED if is_estimate else Source.DERIVED
        super().__init__((Entry(source, key, value) for key, value in derived.items()), decided)


def _is_ours(name: str) -> bool:
    # In any letter case: `millrace_log__level` is a mistyped setting, not a variable of another program.
    return name.upper().startswith(ENV_PREFIX)


def _dotenv_entries(path: Path) -> Iterator[Entry]:
    """The variables of a `.env` file with our prefix, by python-dotenv's parser without its loader.

    Raises SettingsError for an unreadable file, an unreadable line with our prefix, a name without a value and a name
    set twice.
    """
    first_line: dict[str, int] = {}
    for binding in parse_stream(io.StringIO(_read_text_file(path), newline="")):
        # The parser counts from the line after the previous binding, so blank lines before a name are skipped here.
        text = binding.original.string
        line = binding.original.line + text[: len(text) - len(text.lstrip())].count("\n")
        place = f"{path}:{line}"
        if binding.error:
            if ENV_PREFIX in text.upper():
                raise SettingsError(show(place), None, "this line cannot be read", accepted="NAME=value")
            continue
        name = binding.key
        if name is None or not _is_ours(name):
            continue
        entry = Entry(Source.DOTENV, name, binding.value, place)
        if binding.value is None:
            raise SettingsError(entry.written, None, "no value", accepted="NAME=value")
        if name in first_line:
            raise SettingsError(entry.written, None, f"set twice; the first time on line {first_line[name]}")
        first_line[name] = line
        yield entry


def _profile_entries(path: Path) -> Iterator[Entry]:
    text = _read_text_file(path)
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "nested too deeply"
        raise SettingsError(show(str(path)), None, f"not TOML: {reason}") from error
    yield from _flatten(data, "", str(path))


def _flatten(table: Mapping[str, object], prefix: str, place: str) -> Iterator[Entry]:
    """The values of a table and of those in it: `block_size` in `[engine.kv_cache]` is engine.kv_cache.block_size."""
    catalogue = Catalogue.read()
    for name, value in table.items():
        # A quoted "a.b" is one name with a dot in it, not a path; the quotes keep the two apart.
        key = prefix + (name if _BARE_KEY.fullmatch(name) else f'"{name}"')
        # A filled table of an unknown name is walked too, so that the error names a setting, not the table.
        if isinstance(value, dict) and (key in catalogue.groups or (value and key not in catalogue.specs)):
            yield from _flatten(value, f"{key}.", place)
        else:
            yield Entry(Source.PROFILE, key, value, place)


def _read_text_file(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises SettingsError naming the file and the reason."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(show(str(path)), None, f"not UTF-8 at byte {error.start}") from error
    except (OSError, ValueError) as error:
        # ValueError: a path with a null byte in it.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SettingsError(show(str(path)), None, f"cannot be read: {reason}") from error
