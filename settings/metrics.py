"""What a worker tells those who run it."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from settings.accepted import Accepted
from settings.group_config import GROUP_CONFIG
from settings.units import Seconds

# An IPv4 or IPv6 address, or a name that the machine knows.
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")


def _check_host(host: str) -> str:
    if _HOST.fullmatch(host) is None:
        raise ValueError("not a host")
    return host


class MetricsSettings(BaseModel):
    """Metrics and health of a worker, over HTTP. Off by default: a port belongs to one worker of a machine."""

    model_config = GROUP_CONFIG

    port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="Where /metrics and /healthz are served, one port a worker; none: nowhere.",
    )
    host: Annotated[str, Accepted("an address or name of this machine"), AfterValidator(_check_host)] = Field(
        default="127.0.0.1",
        description="Address to serve them on, without a password; 0.0.0.0: on every interface, as in a container.",
    )
    queue_interval_s: Seconds = Field(
        default=5.0,
        ge=1,
        le=60,  # /healthz knows of a Redis that is away, or back, by the last reading
        description="How often the worker reads the queue's figures from Redis for them.",
    )
