"""Loads the settings in force, each with the source its value came from."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from settings.catalogue import Catalogue, JsonValue, Settings, SettingSpec
from settings.entries import Origin, Source
from settings.refusals import contradiction
from settings.sources import (
    CommandLineSource,
    DerivedSource,
    DotEnvSource,
    EnvironmentSource,
    ProfileSource,
    SettingsSource,
)


@dataclass(frozen=True, eq=False)
class EffectiveSettings:
    """The settings in force, each with its source. Frozen: `with_derived` makes another one."""

    settings: Settings
    origins: Mapping[str, Origin]  # one for every key
    sources: tuple[SettingsSource, ...] = field(repr=False)  # strongest first

    @classmethod
    def read(cls, sources: tuple[SettingsSource, ...]) -> EffectiveSettings:
        """The settings of `sources`, strongest first; every other key has its default. Raises SettingsError."""
        defaults = {key: Origin(Source.DEFAULT, key, spec.default) for key, spec in Catalogue.read().specs.items()}
        origins = ChainMap(*(source.origins for source in sources), defaults)  # filled as Settings calls the sources
        try:
            settings = Settings.read_from(sources)
        except ValidationError as error:
            raise contradiction(error, origins) from None
        return cls(settings, MappingProxyType(dict(origins)), sources)

    def source_of(self, key: str) -> Source:
        """Where the value of a dotted key came from. Raises KeyError for a key that does not exist."""
        return self.origins[key].source

    def with_derived(self, derived: Mapping[str, object], *, is_estimate: bool = False) -> EffectiveSettings:
        """The same settings with values the engine found out, where nobody decided them.

        Fills in keys that have their default or were only estimated (`is_estimate`), and keys set to `auto` or none,
        which leaves the decision to the engine. Values have their setting's type; text is not read as a number. Raises
        SettingsError for an unknown key or a value that is not accepted.
        """
        open_sources = {Source.DEFAULT, Source.ESTIMATED}
        decided = {
            key
            for key, spec in Catalogue.read().specs.items()
            if self.source_of(key) not in open_sources and not spec.leaves_open(self.origins[key].value)
        }
        return EffectiveSettings.read((DerivedSource(derived, decided, is_estimate=is_estimate), *self.sources))

    def rows(self) -> list[SettingRow]:
        """One row per setting, in the order of declaration; passwords masked."""
        return [self._row(spec) for spec in Catalogue.read().specs.values()]

    def _row(self, spec: SettingSpec) -> SettingRow:
        value = value_of(self.settings, spec.key)
        return SettingRow(
            key=spec.key,
            variable=Source.ENVIRONMENT.spell(spec.key),
            value=spec.plain(value),
            value_text=spec.text(value),
            source=self.source_of(spec.key),
            accepted=spec.accepted,
            unit=spec.unit,
            description=spec.description,
            default=spec.plain(spec.default),
            default_text=spec.text(spec.default),
        )

    def as_json(self) -> dict[str, dict[str, JsonValue]]:
        """`{key: {"value": ..., "source": ...}}`, ready for json.dumps; passwords masked."""
        return {row.key: {"value": row.value, "source": row.source.value} for row in self.rows()}


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting with its effective value, ready to print; passwords are masked."""

    key: str  # engine.max_num_seqs
    variable: str  # MILLRACE_ENGINE__MAX_NUM_SEQS
    value: JsonValue
    value_text: str  # as it would be written in the environment: true, none, 64
    source: Source
    accepted: str  # a whole number, 1 to 65536
    unit: str | None  # sequences
    description: str
    default: JsonValue
    default_text: str


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
    environment = EnvironmentSource(os.environ if environ is None else environ)
    dotenv = DotEnvSource(dotenv_path)
    profile = ProfileSource(profile_path, environment.profile or dotenv.profile)
    return EffectiveSettings.read((CommandLineSource(overrides or {}), environment, dotenv, profile))


def value_of(settings: Settings, key: str) -> object:
    """The value at a dotted key, which must exist."""
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value
