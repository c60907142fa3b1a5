"""Checks an entry against the catalogue, and says in one line what is wrong with it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from pydantic import ValidationError

from settings.catalogue import Catalogue, SettingSpec
from settings.entries import PROFILE_VARIABLE, Entry, Origin, Source
from settings.errors import FieldOrderError, SettingsError
from settings.fields import MASK, mask_userinfo, show, sounds_secret

# What Kubernetes injects into every pod of a namespace that has a Service named millrace or millrace-something.
_SERVICE_LINK = re.compile(r"MILLRACE_([A-Z0-9_]+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
_LIKELY = 0.7  # likeness from which a name is taken for a mistyped one


def read_entry(entry: Entry) -> tuple[SettingSpec, object]:
    """The setting an entry names, and its typed value. Raises SettingsError."""
    spec = None if entry.key is None else Catalogue.read().specs.get(entry.key)
    if spec is None:
        raise _unknown_setting(entry)
    # A derived value is typed and not read as text: the name of a model in a directory `none` is "none".
    is_typed = entry.source in {Source.DERIVED, Source.ESTIMATED}
    try:
        return spec, spec.check(entry.raw) if is_typed else spec.read(entry.raw)
    except ValueError:
        # The first error knows neither the name as written nor whether the value is secret.
        raise SettingsError(entry.written, spec.show(entry.raw), "", accepted=spec.accepted) from None


def _unknown_setting(entry: Entry) -> SettingsError:
    catalogue, name = Catalogue.read(), entry.dotted.lower()
    nearest = max(catalogue.specs.values(), key=lambda spec: _likeness(name, spec.key))
    likeness = _likeness(name, nearest.key)
    value = _shown_value(entry, nearest)
    if entry.source is Source.ENVIRONMENT and _SERVICE_LINK.fullmatch(entry.name):
        problem = "this looks like a Kubernetes service link: set enableServiceLinks to false in the pod"
        return SettingsError(entry.written, value, f"no such setting; {problem}")
    if entry.dotted in catalogue.groups:
        members = [key for key in catalogue.specs if key.startswith(f"{entry.dotted}.")]
        problem = f"a group of {len(members)} settings, not one; set for instance {entry.source.spell(members[0])}"
        return SettingsError(entry.written, value, problem)
    if entry.source.holds_variables and _likeness(name, "profile") > likeness:
        problem = f"no such setting; did you mean {PROFILE_VARIABLE}?"
        return SettingsError(entry.written, value, problem, accepted="the path of a TOML file")
    spelled = entry.source.spell(nearest.key)
    if likeness < _LIKELY:
        return SettingsError(entry.written, value, "no such setting; `millrace config` lists all")
    problem = f"no such setting; did you mean {spelled}?"
    return SettingsError(entry.written, value, problem, accepted=nearest.accepted)


def _likeness(name: str, key: str) -> float:
    """0 to 1; a right last part with wrong groups (`block_size`) counts nearly as much as a whole key."""
    whole = difflib.SequenceMatcher(None, name, key, autojunk=False).ratio()
    last, key_last = name.rpartition(".")[2], key.rpartition(".")[2]
    return max(whole, 0.9 * difflib.SequenceMatcher(None, last, key_last, autojunk=False).ratio())


def _shown_value(entry: Entry, nearest: SettingSpec) -> str:
    """The value of an unknown setting; hidden where it may be a secret under a mistyped name."""
    scalar = isinstance(entry.raw, str | bool | int | float)
    if nearest.secret or sounds_secret(entry.name) or not (scalar or not entry.raw):
        return MASK
    return show(mask_userinfo(entry.raw) if isinstance(entry.raw, str) else entry.raw)


def contradiction(error: ValidationError, origins: Mapping[str, Origin]) -> SettingsError:
    """The `error` of `Settings`: names the one of two settings that has the stronger source, and quotes the other.

    Their values were accepted one by one, so only a contradiction can be left.
    """
    details = error.errors(include_input=False, include_url=False)[0]
    cause = details.get("ctx", {}).get("error")
    if not isinstance(cause, FieldOrderError):
        raise TypeError(f"settings that passed one by one were refused together: {details['loc']}")
    group = ".".join(str(part) for part in details["loc"])
    low, high = f"{group}.{cause.low}", f"{group}.{cause.high}"
    blame_high = origins[high].source.overrides(origins[low].source)
    blamed, other = (high, low) if blame_high else (low, high)

    def text(key: str) -> str:
        return Catalogue.read().specs[key].text(origins[key].value)

    described = f"{other}, which is {text(other)} ({origins[other].source.value})"
    accepted = cause.at_least(described) if blame_high else cause.at_most(described)
    return SettingsError(origins[blamed].written, text(blamed), "", accepted=accepted)
