"""From what was written to typed values, or to the error that says what is wrong."""

from __future__ import annotations

import re

from settings.catalogue import Catalogue, likeness
from settings.entry import Entry
from settings.errors import SettingsError
from settings.masking import MASK, mask_userinfo, show, sounds_secret
from settings.setting_spec import SettingSpec
from settings.source import PROFILE_VARIABLE, Source

_VARIABLES = {Source.ENVIRONMENT, Source.DOTENV}
# What Kubernetes injects into every pod of a namespace that has a Service named millrace or millrace-something.
_SERVICE_LINK = re.compile(r"MILLRACE_([A-Z0-9_]+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


def resolve(entry: Entry, catalogue: Catalogue) -> tuple[SettingSpec, object]:
    """The setting an entry names, and its typed value. Raises SettingsError."""
    spec = None if entry.key is None else catalogue.specs.get(entry.key)
    if spec is None:
        raise _unknown(entry, catalogue)
    # A derived value has its type: a model whose directory is called "none" has a name.
    read = spec.check if entry.source is Source.DERIVED else spec.read
    try:
        return spec, read(entry.raw)
    except ValueError:
        # Raised again in full: the reader knows neither the name as written nor whether the value is secret.
        raise SettingsError(entry.written, spec.show(entry.raw), "", accepted=spec.accepted) from None


def _unknown(entry: Entry, catalogue: Catalogue) -> SettingsError:
    nearest, likely = catalogue.nearest(entry.dotted)
    value = _shown(entry, nearest)
    if entry.source is Source.ENVIRONMENT and _SERVICE_LINK.fullmatch(entry.name):
        return SettingsError(
            entry.written,
            value,
            "no such setting; this looks like a Kubernetes service link: set enableServiceLinks to false in the pod",
        )
    if entry.dotted in catalogue.groups:
        return _group(entry, value, catalogue)
    if entry.source in _VARIABLES and likeness(entry.dotted, "profile") > likeness(entry.dotted, nearest.key):
        problem = f"no such setting; did you mean {PROFILE_VARIABLE}?"
        return SettingsError(entry.written, value, problem, accepted="the path of a TOML file")
    spelled = entry.source.spell(nearest.key)
    problem = f"did you mean {spelled}?" if likely else f"the nearest is {spelled}"
    return SettingsError(entry.written, value, f"no such setting; {problem}", accepted=nearest.accepted)


def _shown(entry: Entry, nearest: SettingSpec) -> str:
    """The value of an unknown setting; hidden where it may be a secret under a mistyped name."""
    scalar = isinstance(entry.raw, str | bool | int | float)
    if nearest.secret or sounds_secret(entry.name) or not (scalar or not entry.raw):
        return MASK
    return show(mask_userinfo(entry.raw) if isinstance(entry.raw, str) else entry.raw)


def _group(entry: Entry, value: str, catalogue: Catalogue) -> SettingsError:
    members = [spec for spec in catalogue.specs.values() if spec.key.startswith(f"{entry.dotted}.")]
    example = entry.source.spell(members[0].key)
    return SettingsError(
        entry.written, value, f"a group of {len(members)} settings, not one; set for instance {example}"
    )
