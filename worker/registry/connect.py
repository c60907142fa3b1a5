"""Connects to the registry's Redis: its address and password, encryption, and which errors are tried again."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from settings import RedisSettings, SettingsError
from settings.fields import mask_url
from worker.registry.exchange import AsyncRegistryRedis, RegistryRedis

# Six tries over about three seconds: outlives a dropped connection, not a Redis that is down.
_NUM_RETRIES = 6
_RETRY_BASE_S = 0.05
_RETRY_CAP_S = 1.0

T = TypeVar("T")

_REFUSED = (redis.AuthenticationError, redis.exceptions.AuthenticationWrongNumberOfArgsError)

# Answers about the server's state or our rights: the same command succeeds when that changes. Searched for anywhere,
# because a Redis before 7 puts the code of an error inside a script into the text of another.
_PASSING = re.compile(
    r"\b(OOM|READONLY|LOADING|MISCONF|BUSY|MASTERDOWN|NOREPLICAS|CLUSTERDOWN|TRYAGAIN|NOSCRIPT|NOAUTH|NOPERM)\b"
)
_MAY_NOT_WRITE = re.compile(r"\b(READONLY|NOPERM)\b")
_PASSING_TYPES = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoScriptError,
    redis.exceptions.NoPermissionError,
)

MAX_PASSWORD_BYTES = 512


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A URL that may be connected to, with its password, and what the server's certificate is checked with."""

    url: str = field(repr=False)
    ca_file: Path | None

    @classmethod
    def of(cls, settings: RedisSettings) -> Self:
        """The address in these settings. Reads the password file and connects to nothing.

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
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError("redis.password_file", str(file), str(reason), accepted=accepted) from error
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


def connect(settings: RedisSettings) -> redis.Redis:
    """A client that may be shared by threads; it connects when first used. Replies are bytes.

    Raises SettingsError for what RedisAddress refuses.
    """
    return RegistryRedis.from_url(retry=PatientRetry(_backoff(), _NUM_RETRIES), **_options(settings))


def connect_async(settings: RedisSettings) -> AsyncRedis:
    """`connect` for one event loop, the one it is first used in."""
    return AsyncRegistryRedis.from_url(retry=AsyncPatientRetry(_backoff(), _NUM_RETRIES), **_options(settings))


def _backoff() -> ExponentialWithJitterBackoff:
    return ExponentialWithJitterBackoff(base=_RETRY_BASE_S, cap=_RETRY_CAP_S)


def _options(settings: RedisSettings) -> dict[str, Any]:
    address = RedisAddress.of(settings)
    options: dict[str, Any] = {"url": address.url, "decode_responses": False, "client_name": "millrace"}
    options["socket_timeout"] = settings.socket_timeout_s
    options["health_check_interval"] = settings.health_check_interval_s
    if not address.is_socket:  # it takes neither of these
        options |= {"socket_keepalive": True, "socket_connect_timeout": settings.connect_timeout_s}
    if address.ca_file is not None:
        options["ssl_ca_certs"] = str(address.ca_file)
    return options


class PatientRetry(Retry):
    """Tries again what may pass: a lost connection, a Redis that loads; not a wrong password or certificate.

    redis-py takes a wrong password for a lost connection: it made 49 connections in 17 s, where one is enough.
    """

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[[Exception], Any] | Callable[[Exception, int], Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """What `do` returns. Raises its last error."""
        return super().call_with_retry(
            do, fail, is_retryable=unless_refused(is_retryable), with_failure_count=with_failure_count
        )


def unless_refused(is_retryable: Callable[[Exception], bool] | None) -> Callable[[Exception], bool]:
    """Whether an error is worth another try: not a refusal, and what `is_retryable` says, if there is one."""

    def may_pass(error: Exception) -> bool:
        return not is_refusal_to_connect(error) and (is_retryable is None or is_retryable(error))

    return may_pass


def is_refusal_to_connect(error: BaseException) -> bool:
    """Whether our login or the server's certificate was refused: the next try would end the same way."""
    causes = (error, error.__cause__, error.__context__)
    return any(isinstance(cause, (*_REFUSED, ssl.SSLCertVerificationError)) for cause in causes)


class AsyncPatientRetry(AsyncRetry):
    """PatientRetry for redis.asyncio."""

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[[Exception], Any] | Callable[[Exception, int], Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """What `do` returns. Raises its last error."""
        return await super().call_with_retry(
            do, fail, is_retryable=unless_refused(is_retryable), with_failure_count=with_failure_count
        )


def is_refusal(error: redis.RedisError) -> bool:
    """Whether Redis refused a command for what is in it, so that it would refuse it again."""
    if isinstance(error, redis.DataError):  # not even sent
        return True
    if not isinstance(error, redis.ResponseError) or isinstance(error, _PASSING_TYPES):
        return False
    return _PASSING.search(str(error)) is None


def may_not_write(error: redis.ResponseError) -> bool:
    """Whether Redis says that this user may not write, or that it is a replica, in the words of any of its versions."""
    refused = (redis.exceptions.NoPermissionError, redis.exceptions.ReadOnlyError)
    return isinstance(error, refused) or _MAY_NOT_WRITE.search(str(error)) is not None


def read_password_line(file: Path) -> str | None:
    """The file's one line without its end; None where it is empty, longer than 512 bytes, or not one line of text.

    Raises OSError; ValueError for what is not UTF-8. No message quotes what the file holds.
    """
    with file.open("rb") as stream:
        data = stream.read(MAX_PASSWORD_BYTES + 1)
    try:
        line = data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    return line if line and line.isprintable() and len(data) <= MAX_PASSWORD_BYTES else None
