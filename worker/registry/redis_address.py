"""Where Redis is, and what proves who we are."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit, urlunsplit

from settings import RedisSettings, SettingsError
from settings.masking import mask_url
from worker.registry.password_file import MAX_PASSWORD_BYTES, read_password_line


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A URL that may be connected to, with its password, and what the server's certificate is checked with."""

    url: str = field(repr=False)
    ca_file: Path | None

    @classmethod
    def of(cls, settings: RedisSettings) -> Self:
        """Of these settings; the password file is read here, and nothing connects.

        Raises SettingsError: a Redis on another machine without a password, unless redis.allow_unauthenticated; a
        password or CA file that cannot be used.
        """
        url = settings.url.get_secret_value()
        if settings.password_file is not None:
            url = _with_password(url, settings.password_file)
        if not settings.allow_unauthenticated and not _is_on_this_machine(url) and not urlsplit(url).password:
            raise SettingsError(
                "redis.url",
                mask_url(url),
                "on another machine and without a password",
                accepted=(
                    "redis://user:password@host, redis.password_file, a Redis on this machine (localhost, 127.0.0.1, "
                    "unix://), or redis.allow_unauthenticated=true"
                ),
            )
        if settings.ca_file is not None:
            _check_ca_file(settings.ca_file, url)
        return cls(url, settings.ca_file)

    @property
    def is_socket(self) -> bool:
        """Whether it is a Unix socket."""
        return self.url.startswith("unix:")

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the host is this one by its name or number alone: nothing is looked up."""
        return _is_on_this_machine(self.url)

    @property
    def is_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.url.startswith("rediss:")


def _is_on_this_machine(url: str) -> bool:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "unix" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may be anybody's
        return False


def _with_password(url: str, file: Path) -> str:
    parts = urlsplit(url)
    if parts.password:
        raise SettingsError("redis.password_file", str(file), "redis.url has a password too", accepted="one of the two")
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.rstrip(':')}:{quote(_password(file), safe='')}@{host}"))


def _password(file: Path) -> str:
    accepted = f"a readable file that holds one line, at most {MAX_PASSWORD_BYTES} bytes"
    try:
        password = read_password_line(file)
    except OSError as error:
        raise SettingsError("redis.password_file", str(file), str(error.strerror), accepted=accepted) from error
    except ValueError as error:
        raise SettingsError("redis.password_file", str(file), str(error), accepted=accepted) from error
    if password is None:
        raise SettingsError("redis.password_file", str(file), "holds no password", accepted=accepted)
    return password


def _check_ca_file(file: Path, url: str) -> None:
    if not url.startswith("rediss:"):
        raise SettingsError(
            "redis.ca_file", str(file), "redis.url is not encrypted, so no certificate is checked", accepted="rediss://"
        )
    try:
        ssl.create_default_context(cafile=str(file))
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or "cannot be read"
        raise SettingsError("redis.ca_file", str(file), reason, accepted="a PEM file of certificates") from error
