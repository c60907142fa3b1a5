"""Connects to the registry's Redis: its address and password, encryption, which errors are tried again, and what may be
trusted to it.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
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
from settings.redis import Ack
from worker.registry.errors import NotDurable
from worker.registry.exchange import AsyncRegistryRedis, RegistryRedis, ask
from worker.registry.keys import Keys
from worker.registry.lua import Scripts

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

_HAS_WAITAOF = (7, 2)

ASK_AGAIN_S = 60.0  # for a new append-only file, where the last one failed: a full disk stays full for a while
REFUSED_S = 3600.0  # likewise where Redis refused: its administrator must be there first

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class RedisServer:
    """What a server's INFO says of whether it keeps what it has acknowledged."""

    version: tuple[int, int]  # that whose commands it has
    eviction_policy: str
    max_memory_bytes: int  # 0: no limit, so that nothing is ever evicted
    has_append_only_file: bool
    has_saved: bool  # a snapshot, since it was started
    num_replicas: int

    @classmethod
    def of_info(cls, info: Mapping[str, object]) -> Self:
        """Of INFO's fields; one that this server does not give counts as not there."""
        major, minor, *_ = (
            *(int(part) if part.isdecimal() else 0 for part in f"{info.get('redis_version')}".split(".")),
            0,
        )
        return cls(
            version=(major, minor),
            eviction_policy=str(info.get("maxmemory_policy", "unknown")),
            max_memory_bytes=int(str(info.get("maxmemory", 0))),
            has_append_only_file=str(info.get("aof_enabled")) == "1",
            has_saved=str(info.get("rdb_last_bgsave_time_sec", -1)) != "-1",
            num_replicas=int(str(info.get("connected_slaves", 0))),
        )

    @property
    def may_evict(self) -> bool:
        """Whether it is set to drop keys once it has a limit and reaches it."""
        return self.eviction_policy != "noeviction"

    @property
    def lost_at_its_end(self) -> str:
        """What it forgets when it ends, beside at most a second of writes; "": nothing."""
        if self.has_append_only_file:
            return ""
        return "what came after the last snapshot" if self.has_saved else "all jobs and results"

    def check(self, settings: RedisSettings) -> None:
        """Raise SettingsError for a server that drops jobs, warn of one that forgets them, unless it is allowed to."""
        if settings.allow_unsafe:
            return
        if self.may_evict and self.max_memory_bytes:
            raise SettingsError(
                "Redis's maxmemory-policy",
                self.eviction_policy,
                "a full Redis drops jobs and results",
                accepted="noeviction (redis-cli CONFIG SET maxmemory-policy noeviction), or redis.allow_unsafe=true",
            )
        if self.may_evict:
            logger.warning("Redis's maxmemory-policy is %s: with a maxmemory it would drop jobs", self.eviction_policy)
        if self.lost_at_its_end:
            logger.warning(
                "Redis keeps no append-only file: when it ends it loses %s (redis.allow_unsafe=true says it may)",
                self.lost_at_its_end,
            )

    def check_ack(self, ack: Ack) -> None:
        """Raise SettingsError for a server that cannot acknowledge so."""
        if ack == "disk" and self.version < _HAS_WAITAOF:
            shown = ".".join(map(str, self.version))
            raise _ack_refused(ack, f"Redis {shown} cannot say when its disk has something", "Redis 7.2 or later")
        if ack == "disk" and not self.has_append_only_file:
            raise _ack_refused(ack, "Redis keeps no append-only file", "appendonly yes in redis.conf")
        if ack == "replica" and not self.num_replicas:
            raise _ack_refused(ack, "Redis has no replica", "a primary with a connected replica")


def _ack_refused(ack: Ack, problem: str, accepted: str) -> SettingsError:
    return SettingsError("redis.ack", ack, problem, accepted=f"{accepted}, or redis.ack=memory")


class Trust:
    """Looks once whether a server may be trusted with jobs, and waits until it has one where `redis.ack` wants it."""

    def __init__(self, client: redis.Redis, keys: Keys, settings: RedisSettings) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._server: RedisServer | None = None

    def check(self) -> None:
        """Look, the first time. Raises SettingsError, see RedisServer.check and check_ack, and redis.RedisError."""
        if self._server is None:
            server = RedisServer.of_info(self._client.info())
            server.check(self._settings)
            server.check_ack(self._settings.ack)
            self._server = server

    def check_ack(self) -> None:
        """Look whether Redis can acknowledge as redis.ack says; a job can be cancelled in any Redis without it."""
        if self._server is None and self._settings.ack != "memory":
            RedisServer.of_info(self._client.info()).check_ack(self._settings.ack)

    def wait_until_durable(self, job_id: str, done: str) -> None:
        """Wait for what this job has become, `done`. Raises NotDurable after half of redis.socket_timeout_s."""
        ack = self._settings.ack
        if ack == "memory":
            return
        timeout_s = self._settings.socket_timeout_s / 2
        timeout_ms = round(timeout_s * 1000)
        wait = ("WAITAOF", 1, 0, timeout_ms) if ack == "disk" else ("WAIT", 1, timeout_ms)
        # Redis waits for the last write of the same connection, and so for all before it, by whatever connection: a
        # pool's may have written nothing yet, for which Redis answers at once.
        _, answer = ask(self._client, [Scripts.ACKNOWLEDGE(self._keys.of_queue_scripts(), ack=ack), wait])
        if (answer[0] if ack == "disk" else answer) < 1:
            raise NotDurable(job_id, done, ack, timeout_s)


class AppendOnlyFile:
    """Has Redis write its append-only file anew once after each of its starts.

    A power cut may end the file within what one script wrote. Redis leaves that out, but where it ends within a command
    its beginning stays in the file and what comes next is written behind it (6.2 and 7.0 do so; valkey#4342). With the
    start after that the beginning is there after all: the counters of 16 prompts were given back twice.
    """

    def __init__(self, client: redis.Redis, *, ask_again_s: float = ASK_AGAIN_S) -> None:
        self._client = client
        self._ask_again_s = ask_again_s
        self._asked = ""  # which start of Redis (its run_id) it was asked for
        self._ask_at_s = -math.inf  # time.monotonic() from which on that may be again

    def renew(self) -> None:
        """Ask for it if Redis has not written it since its start and is not about to.

        Raises redis.RedisError when Redis cannot be had; a refusal is logged, and asked again after REFUSED_S.
        """
        info = self._client.info()
        if not RedisServer.of_info(info).has_append_only_file or has_renewed(info):
            return
        if info.get("aof_rewrite_in_progress") or info.get("aof_rewrite_scheduled"):
            return
        run_id = str(info.get("run_id"))
        if run_id == self._asked and time.monotonic() < self._ask_at_s:
            return
        self._asked = run_id
        self._ask_at_s = time.monotonic() + self._ask_again_s
        try:
            self._client.bgrewriteaof()
        except redis.ResponseError as error:
            if "in progress" not in str(error):  # another worker's
                self._ask_at_s = time.monotonic() + REFUSED_S
                logger.warning("Redis does not write its append-only file anew, see OPERATIONS: %s", error)
        else:
            logger.info("Redis writes its append-only file anew, for the first time since its start")


def has_renewed(info: Mapping[str, object]) -> bool:
    """Whether a server has written its file anew since it started, by INFO; not where the last time failed."""
    is_first = str(info.get("aof_last_rewrite_time_sec", -1)) == "-1"
    return not is_first and info.get("aof_last_bgrewrite_status") == "ok"
