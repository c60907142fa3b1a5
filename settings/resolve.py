"""Turns what was written into the settings in force, each with its source, or into the error that says what is wrong.

`load_settings` reads every entry, also one that a stronger source overrides: a fault must not wait for its day.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from settings.catalogue import Catalogue, JsonValue, Settings, SettingSpec, likeness
from settings.errors import FieldOrderError, SettingsError
from settings.masking import MASK, mask_userinfo, show, sounds_secret
from settings.sources import (
    PROFILE_VARIABLE,
    Entry,
    Origin,
    Source,
    dotenv_entries,
    environment_entries,
    profile_entries,
)

_VARIABLES = {Source.ENVIRONMENT, Source.DOTENV}
# What Kubernetes injects into every pod of a namespace that has a Service named millrace or millrace-something.
_SERVICE_LINK = re.compile(r"MILLRACE_([A-Z0-9_]+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


@dataclass(frozen=True, eq=False)
class EffectiveSettings:
    """The settings in force, each with its source. Frozen: `with_derived` makes another one."""

    settings: Settings
    origins: Mapping[str, Origin]  # one for every key
    catalogue: Catalogue = field(repr=False)

    @classmethod
    def build(
        cls, values: Mapping[str, object], origins: Mapping[str, Origin], catalogue: Catalogue
    ) -> EffectiveSettings:
        """The settings with these typed values and origins; every other key has its default. Raises SettingsError."""
        defaults = {key: Origin(Source.DEFAULT, key) for key in catalogue.specs}
        complete = MappingProxyType({**defaults, **origins})
        return cls(build_settings(values, complete, catalogue), complete, catalogue)

    def source_of(self, key: str) -> Source:
        """Where the value of a dotted key came from. Raises KeyError for a key that does not exist."""
        return self.origins[key].source

    def with_derived(self, derived: Mapping[str, object], *, is_estimate: bool = False) -> EffectiveSettings:
        """The same settings with values the engine found out, where nobody decided them.

        Filled in are keys that still have their default, keys that were only estimated (`is_estimate`), and keys
        somebody set to `auto` or none, which leaves the decision to the engine. Values have their setting's type;
        text is not read as a number. Raises SettingsError for an unknown key or a value that is not accepted.
        """
        values = {key: value_of(self.settings, key) for key, origin in self.origins.items() if self._decided(origin)}
        origins = {key: origin for key, origin in self.origins.items() if self._decided(origin)}
        source = Source.ESTIMATED if is_estimate else Source.DERIVED
        for name, raw in derived.items():
            spec, value = resolve(Entry(Source.DERIVED, name, raw), self.catalogue)
            is_estimated = spec.key in origins and origins[spec.key].source is Source.ESTIMATED
            if spec.key not in values or is_estimated or spec.leaves_open(values[spec.key]):
                values[spec.key] = value
                origins[spec.key] = Origin(source, spec.key)
        return EffectiveSettings.build(values, origins, self.catalogue)

    @staticmethod
    def _decided(origin: Origin) -> bool:
        return origin.source is not Source.DEFAULT

    def rows(self) -> list[SettingRow]:
        """One row per setting, in the order of declaration; passwords masked."""
        return [self._row(key) for key in self.catalogue.specs]

    def _row(self, key: str) -> SettingRow:
        spec = self.catalogue.specs[key]
        value = value_of(self.settings, key)
        return SettingRow(
            key=key,
            variable=Source.ENVIRONMENT.spell(key),
            value=spec.plain(value),
            value_text=spec.text(value),
            source=self.source_of(key),
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
    unit: str | None  # requests
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
    catalogue = Catalogue.read()
    values: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    written = [Entry(Source.COMMAND_LINE, key, raw) for key, raw in (overrides or {}).items()]
    variables = [
        *environment_entries(os.environ if environ is None else environ),
        *_entries_of_dotenv(dotenv_path),
    ]
    written += [entry for entry in variables if entry.name != PROFILE_VARIABLE]
    written += _entries_of_profile(profile_path, variables, catalogue.specs.keys())
    for entry in written:
        # Every entry is read, also one that a stronger source overrides: a fault must not wait for its day.
        spec, value = resolve(entry, catalogue)
        if spec.key not in values:
            values[spec.key] = value
            origins[spec.key] = Origin(entry.source, entry.written)
    return EffectiveSettings.build(values, origins, catalogue)


def _entries_of_dotenv(path: Path | None) -> Iterator[Entry]:
    if path is not None:
        return dotenv_entries(path)
    default = Path(".env")
    return dotenv_entries(default) if default.is_file() else iter(())


def _entries_of_profile(path: Path | None, variables: Iterable[Entry], keys: Collection[str]) -> Iterator[Entry]:
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


def resolve(entry: Entry, catalogue: Catalogue) -> tuple[SettingSpec, object]:
    """The setting an entry names, and its typed value. Raises SettingsError."""
    spec = None if entry.key is None else catalogue.specs.get(entry.key)
    if spec is None:
        raise _unknown_setting(entry, catalogue)
    # A derived value has its type: a model whose directory is called "none" has a name.
    read = spec.check if entry.source is Source.DERIVED else spec.read
    try:
        return spec, read(entry.raw)
    except ValueError:
        # Raised again in full: the reader knows neither the name as written nor whether the value is secret.
        raise SettingsError(entry.written, spec.show(entry.raw), "", accepted=spec.accepted) from None


def _unknown_setting(entry: Entry, catalogue: Catalogue) -> SettingsError:
    nearest, likely = catalogue.nearest(entry.dotted)
    value = _shown_value(entry, nearest)
    if entry.source is Source.ENVIRONMENT and _SERVICE_LINK.fullmatch(entry.name):
        return SettingsError(
            entry.written,
            value,
            "no such setting; this looks like a Kubernetes service link: set enableServiceLinks to false in the pod",
        )
    if entry.dotted in catalogue.groups:
        return _group_named_as_setting(entry, value, catalogue)
    if entry.source in _VARIABLES and likeness(entry.dotted, "profile") > likeness(entry.dotted, nearest.key):
        problem = f"no such setting; did you mean {PROFILE_VARIABLE}?"
        return SettingsError(entry.written, value, problem, accepted="the path of a TOML file")
    spelled = entry.source.spell(nearest.key)
    problem = f"did you mean {spelled}?" if likely else f"the nearest is {spelled}"
    return SettingsError(entry.written, value, f"no such setting; {problem}", accepted=nearest.accepted)


def _shown_value(entry: Entry, nearest: SettingSpec) -> str:
    """The value of an unknown setting; hidden where it may be a secret under a mistyped name."""
    scalar = isinstance(entry.raw, str | bool | int | float)
    if nearest.secret or sounds_secret(entry.name) or not (scalar or not entry.raw):
        return MASK
    return show(mask_userinfo(entry.raw) if isinstance(entry.raw, str) else entry.raw)


def _group_named_as_setting(entry: Entry, value: str, catalogue: Catalogue) -> SettingsError:
    members = [spec for spec in catalogue.specs.values() if spec.key.startswith(f"{entry.dotted}.")]
    example = entry.source.spell(members[0].key)
    return SettingsError(
        entry.written, value, f"a group of {len(members)} settings, not one; set for instance {example}"
    )


def build_settings(values: Mapping[str, object], origins: Mapping[str, Origin], catalogue: Catalogue) -> Settings:
    """`Settings` of typed values by dotted key. Raises SettingsError where two of them contradict each other."""
    try:
        return Settings.model_validate(_nest(values))
    except ValidationError as error:
        raise _contradiction(error, values, origins, catalogue) from None


def value_of(settings: Settings, key: str) -> object:
    """The value at a dotted key, which must exist."""
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _nest(values: Mapping[str, object]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        table = tree
        for group in groups:
            child = table.setdefault(group, {})
            if not isinstance(child, dict):
                raise TypeError(f"{key} is inside of a value")
            table = child
        table[name] = value
    return tree


def _contradiction(
    error: ValidationError, values: Mapping[str, object], origins: Mapping[str, Origin], catalogue: Catalogue
) -> SettingsError:
    """Blames the one of the two settings that was set most deliberately, and quotes the other with its source."""
    details = error.errors(include_input=False, include_url=False)[0]
    cause = details.get("ctx", {}).get("error")
    if not isinstance(cause, FieldOrderError):
        # Every value has passed its own check, so only a contradiction can be left.
        raise TypeError(f"settings that passed one by one were refused together: {details['loc']}")
    group = ".".join(str(part) for part in details["loc"])
    low, high = f"{group}.{cause.low}", f"{group}.{cause.high}"

    def described(key: str) -> str:
        spec = catalogue.specs[key]
        return f"{key}, which is {spec.text(values.get(key, spec.default))} ({origins[key].source.value})"

    blame_high = origins[high].source.overrides(origins[low].source)
    blamed = high if blame_high else low
    accepted = cause.at_least(described(low)) if blame_high else cause.at_most(described(high))
    spec = catalogue.specs[blamed]
    return SettingsError(origins[blamed].written, spec.text(values.get(blamed, spec.default)), "", accepted=accepted)
