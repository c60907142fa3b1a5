"""Gathering settings from everywhere."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from settings.catalogue import Catalogue
from settings.dotenv_entries import dotenv_entries
from settings.effective_settings import EffectiveSettings
from settings.entry import Entry
from settings.environment_entries import environment_entries
from settings.errors import SettingsError
from settings.origin import Origin
from settings.profile_entries import profile_entries
from settings.resolving import resolve
from settings.source import PROFILE_VARIABLE, Source


def load_settings(
    overrides: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    dotenv_path: Path | None = None,
    profile_path: Path | None = None,
) -> EffectiveSettings:
    """The settings in force: `overrides` before the environment before `.env` before the TOML profile before defaults.

    `overrides`: by dotted key; text is read like a variable's, other values must have the setting's type.
    `environ`: os.environ unless given. `dotenv_path`: `./.env`, if there is one, unless given.
    `profile_path`: else MILLRACE_PROFILE, from the environment or `.env`; else no profile.
    Raises SettingsError, one line, for the first fault found: unreadable files first, then by strength of source.
    """
    catalogue = Catalogue.read()
    values: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    written = [Entry(Source.COMMAND_LINE, key, raw) for key, raw in (overrides or {}).items()]
    variables = [
        *environment_entries(os.environ if environ is None else environ),
        *_dotenv_entries(dotenv_path),
    ]
    written += [entry for entry in variables if entry.name != PROFILE_VARIABLE]
    written += _profile_entries(profile_path, variables, catalogue.specs.keys())
    for entry in written:
        # Every entry is read, also one that a stronger source overrides: a fault must not wait for its day.
        spec, value = resolve(entry, catalogue)
        if spec.key not in values:
            values[spec.key] = value
            origins[spec.key] = Origin(entry.source, entry.written)
    return EffectiveSettings.build(values, origins, catalogue)


def _dotenv_entries(path: Path | None) -> Iterator[Entry]:
    if path is not None:
        return dotenv_entries(path)
    default = Path(".env")
    return dotenv_entries(default) if default.is_file() else iter(())


def _profile_entries(path: Path | None, variables: Iterable[Entry], keys: Collection[str]) -> Iterator[Entry]:
    if path is not None:
        yield from profile_entries(path, keys)
        return
    named = next((entry for entry in variables if entry.name == PROFILE_VARIABLE), None)
    if named is None:
        return
    if named.raw == "":
        raise SettingsError(named.written, "''", "", accepted="the path of a TOML file")
    # A missing profile is an error that names the variable as well as the file: neither alone says what to mend.
    try:
        yield from profile_entries(Path(str(named.raw)), keys)
    except SettingsError as error:
        raise SettingsError(named.written, None, str(error)) from error
