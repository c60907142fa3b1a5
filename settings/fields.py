"""The types that settings are declared with; how values are read from text, written, and shown without passwords."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

TRUE_WORDS = ("true", "on", "yes", "1")
FALSE_WORDS = ("false", "off", "no", "0")
NONE_WORD = "none"
BOOLEAN_FORMS = f"{', '.join(TRUE_WORDS)} or {', '.join(FALSE_WORDS)}"

# At most 19 digits: more than any setting holds, and far below the 4300 at which int() itself refuses.
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?")

MASK = "***"
_LONGEST_SHOWN = 120
# Up to the *last* @: a password with an unescaped @ or / in it must not leave its tail behind.
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^:@/?]*)(?P<password>:.*)?@", re.DOTALL)
_QUERY_PASSWORD = re.compile(r"([?&][^=&]*(?:pass|secret|token)[^=&]*=)[^&#]*", re.IGNORECASE)
_SECRET_NAME = re.compile(r"pass|secret|credential|auth|api_?key|url", re.IGNORECASE)


class SettingsGroup(BaseModel):
    """Settings that belong together: frozen, declared names only, strictly typed.

    A boolean is not a number, and "64" is not 64: the functions below read text before pydantic sees it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number counts, in the plural where it has one: `s`, `bytes`, `tokens`, `sequences`."""

    name: str


Seconds = Annotated[float, Unit("s")]
WholeSeconds = Annotated[int, Unit("s")]
Bytes = Annotated[int, Unit("bytes")]
Tokens = Annotated[int, Unit("tokens")]
Blocks = Annotated[int, Unit("blocks")]
Steps = Annotated[int, Unit("steps")]
Sequences = Annotated[int, Unit("sequences")]
Prompts = Annotated[int, Unit("prompts")]
Jobs = Annotated[int, Unit("jobs")]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted forms in words, where type and bounds do not say them: a mark on a setting's declaration."""

    text: str


def read_boolean(text: str) -> bool:
    """One of BOOLEAN_FORMS, in any letter case. Raises ValueError."""
    word = text.lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError("not a boolean")


def read_whole_number(text: str) -> int:
    """Decimal digits with an optional minus; no plus, underscore, leading zero or space. Raises ValueError."""
    if _WHOLE_NUMBER.fullmatch(text) is None:
        raise ValueError("not a whole number")
    return int(text)


def read_number(text: str) -> float:
    """A whole number with an optional fraction and exponent; finite. Raises ValueError."""
    if _NUMBER.fullmatch(text) is None or not math.isfinite(float(text)):
        raise ValueError("not a number")
    return float(text)


NAMES_FORMS = "names of 1 to 256 characters, separated by commas"


def read_names(text: str | None) -> tuple[str, ...]:
    """Names separated by commas, without the spaces around them; none of `None`. Raises ValueError."""
    names = tuple(name.strip() for name in text.split(",")) if text is not None else ()
    if not all(0 < len(name) <= 256 and name.isprintable() for name in names) or len(set(names)) < len(names):
        raise ValueError("not names")
    return names


def _check_names(text: str) -> str:
    read_names(text)
    return text


HOSTS_FORMS = "hosts separated by commas, each host, host:port, [IPv6], [IPv6]:port or *.domain"
_HOST_ENTRY = re.compile(r"((\*\.)?[a-z0-9_-][a-z0-9._-]*|\[[0-9a-f:.]{2,45}\])(:[1-9][0-9]{0,4})?", re.IGNORECASE)


def _check_hosts(text: str) -> str:
    # What is no host would allow none or, as `*.`, one that nobody meant: every name with a dot at its end.
    if not all(map(_HOST_ENTRY.fullmatch, read_names(text))):
        raise ValueError("not hosts")
    return text


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("not printable")  # it is shown on terminals
    return text


Name = Annotated[str, AfterValidator(_check_printable)]
Names = Annotated[str, AfterValidator(_check_names)]
Hosts = Annotated[str, AfterValidator(_check_hosts)]


def write(value: object) -> str:
    """A value as the readers above read it back: `true`, `none`, `64`, `0.5`."""
    if value is None:
        return NONE_WORD
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)


def mask_url(url: str) -> str:
    """A URL without its passwords: `redis://user:***@host/0`. What is no URL is hidden whole."""
    if "://" not in url:
        return MASK
    return mask_userinfo(url)


def mask_refused_url(url: str) -> str:
    """What may be shown of a URL that was not understood: its scheme, since the password may be anywhere after it."""
    scheme, separator, _ = url.partition("://")
    return f"{scheme}://{MASK}" if separator and scheme.isalpha() else MASK


def mask_userinfo(text: str) -> str:
    """Any text, without the passwords of a URL that may be in it."""
    masked = _USERINFO.sub(_without_password, text)
    return _QUERY_PASSWORD.sub(rf"\1{MASK}", masked)


def _without_password(match: re.Match[str]) -> str:
    if match["password"] is None:
        # redis://TOKEN@host: to Redis that is a user name, but people put a token there.
        return f"{match['scheme']}{MASK}@"
    return f"{match['scheme']}{match['user']}:{MASK}@"


def sounds_secret(name: str) -> bool:
    """Whether to hide an unknown setting's value, since its name may be that of a secret, mistyped."""
    return _SECRET_NAME.search(name) is not None


def show(value: object) -> str:
    """A name or value on one line: as written where that is readable, else quoted with escapes; long ones are cut."""
    text = value if isinstance(value, str) else write(value)
    if text == "" or " " in text or not text.isprintable():
        text = repr(text)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."
