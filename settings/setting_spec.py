"""What one setting is, and how a value for it is read and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr, TypeAdapter, ValidationError

from settings.grammar import (
    NONE_WORD,
    read_boolean,
    read_choice,
    read_number,
    read_whole_number,
    write,
)
from settings.masking import MASK, mask_refused_url, mask_url, mask_userinfo, show

JsonValue = bool | int | float | str | None

_READERS: Mapping[type, Callable[[str], object]] = {
    bool: read_boolean,
    int: read_whole_number,
    float: read_number,
    Path: Path,
    SecretStr: SecretStr,
    str: str,
}


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One setting: its dotted key, what it accepts, and how values are read and shown."""

    key: str
    kind: type  # bool, int, float, str, Path or SecretStr
    choices: tuple[str, ...]  # lower-case words; empty unless the setting is a choice
    optional: bool  # accepts none
    unit: str | None  # what a number counts, e.g. "tokens"
    accepted: str  # the accepted forms, in words
    description: str
    default: object
    adapter: TypeAdapter[object]  # checks type and bounds, strictly

    @property
    def secret(self) -> bool:
        """Whether the value may hold a password."""
        return self.kind is SecretStr

    def leaves_open(self, value: object) -> bool:
        """Whether a value leaves the decision to the engine: none, or the choice `auto`."""
        return value is None or (bool(self.choices) and value == "auto")

    def read(self, raw: object) -> object:
        """The typed value of what was written. Raises ValueError where it is not accepted.

        Text goes through the one grammar; a value that already has a type (from TOML, or from Python) must have the
        setting's own.
        """
        return self.check(self._from_text(raw) if isinstance(raw, str) else self._from_typed(raw))

    def check(self, value: object) -> object:
        """A typed value, if it is accepted; text is no number here. Raises ValueError."""
        try:
            return self.adapter.validate_python(value)
        except ValidationError:
            # pydantic's message quotes the value, which may be secret; `accepted` says what this one should be.
            raise ValueError("not accepted") from None

    def _from_text(self, text: str) -> object:
        if text == "":
            raise ValueError("empty")
        if self.optional and text.lower() == NONE_WORD:
            return None
        if self.choices:
            return read_choice(text, self.choices)
        if "\0" in text:
            raise ValueError("holds a null byte")
        return _READERS[self.kind](text)

    def _from_typed(self, value: object) -> object:
        # A boolean written as 1 or 0 is accepted as text, so TOML's 1 and 0 are too: one grammar, not two.
        if self.kind is bool and type(value) is int:
            return read_boolean(str(value))
        return value

    def plain(self, value: object) -> JsonValue:
        """A typed value as JSON holds it: paths as text, passwords masked."""
        if isinstance(value, SecretStr):
            return mask_url(value.get_secret_value())
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value)

    def text(self, value: object) -> str:
        """A typed value as it would be written in the environment, passwords masked."""
        return write(self.plain(value))

    def show(self, raw: object) -> str:
        """What was written and not accepted, for an error line: on one line, passwords masked."""
        if isinstance(raw, SecretStr):
            raw = raw.get_secret_value()
        if not isinstance(raw, str):
            return MASK if self.secret else show(raw)
        return show(mask_refused_url(raw) if self.secret and raw else mask_userinfo(raw))
