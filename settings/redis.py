"""The connection to Redis, and how long jobs stay there: the group `redis`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr

from settings.fields import Accepted, Seconds, SettingsGroup, WholeSeconds

_URL_FORMS = "redis://[user:password@]host[:port][/db], rediss:// likewise, or unix:///path"
# No `$`, `{` or space: `${HOST}` is a variable that no shell has replaced.
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")


Ack = Literal["memory", "disk", "replica"]


def _check_url(secret: SecretStr) -> SecretStr:
    if not _is_redis_url(secret.get_secret_value()):
        raise ValueError("not a Redis URL")  # never with the URL, which may hold a password
    return secret


def _is_redis_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return False
    if not url.isprintable() or " " in url:
        return False
    if parts.scheme == "unix":
        return parts.path.startswith("/")
    return (
        parts.scheme in {"redis", "rediss"}
        and _HOST.fullmatch(host or "") is not None
        and port != 0
        and re.fullmatch(r"(/[0-9]*)?", parts.path, re.ASCII) is not None
        and not parts.fragment
    )


class RedisSettings(SettingsGroup):
    """The Redis that holds queue, registry and results."""

    url: Annotated[SecretStr, Accepted(_URL_FORMS), AfterValidator(_check_url)] = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"), description="Redis to connect to. The password is never printed."
    )
    password_file: Annotated[Path, Accepted("the path of a file that holds the password")] | None = Field(
        default=None, description="File with the password of redis.url, which then holds a user name and no password."
    )
    ca_file: Annotated[Path, Accepted("the path of a PEM file of certificates")] | None = Field(
        default=None, description="Who must have signed the server's certificate; none: whom this machine trusts."
    )
    allow_unauthenticated: bool = Field(
        default=False, description="Whether a Redis on another machine may be used without a password."
    )
    allow_unsafe: bool = Field(
        default=False,
        description="Whether a Redis may be used that drops jobs when it is full or forgets them at its end.",
    )
    ack: Ack = Field(
        default="memory",
        description="Where a client's submit or cancel must have come before it returns: Redis's memory, its disk "
        "(Redis 7.2, append-only file) or a replica. It waits for half of redis.socket_timeout_s at most.",
    )
    socket_timeout_s: Seconds = Field(
        default=10.0,
        ge=0.1,
        le=600,
        description="Longest wait for one reply of Redis before the connection is dropped.",
    )
    connect_timeout_s: Seconds = Field(
        default=5.0, ge=0.1, le=600, description="Longest wait for a connection to Redis."
    )
    health_check_interval_s: WholeSeconds = Field(
        default=5, ge=1, le=3600, description="A connection idle for longer is pinged before it is used again."
    )
    result_ttl_s: WholeSeconds = Field(
        default=86_400, ge=1, le=31_536_000, description="How long a finished job and its results are kept."
    )
    staging_ttl_s: WholeSeconds = Field(
        default=3_600, ge=1, le=31_536_000, description="How long lines that were staged but never submitted are kept."
    )
