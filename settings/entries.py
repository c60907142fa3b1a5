"""A setting's value as somebody wrote it, and how its name is spelled in each place it can be written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from settings.errors import SettingsError
from settings.fields import mask_userinfo, show

ENV_PREFIX = "MILLRACE_"
ENV_DELIMITER = "__"
PROFILE_VARIABLE = "MILLRACE_PROFILE"  # names the TOML profile; not a setting itself


class Source(Enum):
    """Where a value came from, strongest first. The value is what `millrace config` prints."""

    COMMAND_LINE = "command line"
    ENVIRONMENT = "environment"
    DOTENV = ".env"
    PROFILE = "profile"
    DERIVED = "derived"
    ESTIMATED = "estimated"  # derived without loading the model, which measures it
    DEFAULT = "default"

    @property
    def holds_variables(self) -> bool:
        """Whether settings are named like environment variables here."""
        return self in {Source.ENVIRONMENT, Source.DOTENV}

    def overrides(self, other: Source) -> bool:
        """Whether this source is stronger than `other`."""
        order = list(Source)
        return order.index(self) < order.index(other)

    def spell(self, key: str) -> str:
        """A dotted key as it is written in this source: `engine.seed` is `MILLRACE_ENGINE__SEED` in `.env`."""
        if self is Source.COMMAND_LINE:
            return f"--set {key}"
        if self.holds_variables:
            return ENV_PREFIX + key.upper().replace(".", ENV_DELIMITER)
        return key


@dataclass(frozen=True, slots=True)
class Entry:
    """One value as somebody wrote it, before anything is known about it."""

    source: Source
    name: str  # as written: MILLRACE_ENGINE__SEED in the environment and .env, engine.seed elsewhere
    raw: object = field(repr=False)  # text, or what TOML or a Python caller made of it; may hold a password
    place: str = ""  # file and line, for error messages: "config/.env:3"

    @property
    def key(self) -> str | None:
        """The dotted key this name stands for, known or not; None if no key is written like this."""
        if not self.source.holds_variables:
            return self.name
        key = self.dotted
        return key if self.source.spell(key) == self.name else None

    @property
    def dotted(self) -> str:
        """The name turned into a dotted key as well as it can be, to find what was meant."""
        if not self.source.holds_variables:
            return self.name.lower()
        return self.name[len(ENV_PREFIX) :].lower().replace(ENV_DELIMITER, ".")

    @property
    def written(self) -> str:
        """The name as the user wrote it, with its place, on one line."""
        name = f"--set {show(self.name)}" if self.source is Source.COMMAND_LINE else show(self.name)
        return f"{show(self.place)}: {name}" if self.place else name


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value in force came from, and under which name, so that a later error can say so."""

    source: Source
    written: str
    value: object  # typed; a password is in a SecretStr, which hides it


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """`["engine.seed=7"]` as overrides for `load_settings`; of a key set twice the last counts, as with any option.

    Keys and values are not looked at here. Raises SettingsError for a text without `=` or without a key.
    """
    overrides: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SettingsError(
                f"--set {show(mask_userinfo(text))}", None, "", accepted="key=value, such as engine.max_num_seqs=64"
            )
        overrides[key] = value
    return overrides
