"""From typed values to `Settings`."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from settings.catalogue import Catalogue
from settings.errors import FieldOrderError, SettingsError
from settings.origin import Origin
from settings.root import Settings


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
