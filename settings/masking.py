"""Shows names and values in messages: on one line, cut at 120 characters, without passwords."""

from __future__ import annotations

import re

from settings.fields import write

MASK = "***"
_LONGEST_SHOWN = 120
# Up to the *last* @: a password with an unescaped @ or / in it must not leave its tail behind.
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^:@/?]*)(?P<password>:.*)?@", re.DOTALL)
_QUERY_PASSWORD = re.compile(r"([?&][^=&]*(?:pass|secret|token)[^=&]*=)[^&#]*", re.IGNORECASE)
_SECRET_NAME = re.compile(r"pass|secret|credential|auth|api_?key|url", re.IGNORECASE)


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
