"""The settings in force, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from settings.building import build_settings, value_of
from settings.catalogue import Catalogue
from settings.entry import Entry
from settings.origin import Origin
from settings.resolving import resolve
from settings.root import Settings
from settings.setting_row import SettingRow
from settings.setting_spec import JsonValue
from settings.source import Source


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
