"""Logs, metrics and health over HTTP, and spans for OpenTelemetry: the groups `log`, `metrics` and `tracing`."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from settings.fields import Accepted, Seconds, SettingsGroup, Unit

# An IPv4 or IPv6 address, or a name that the machine knows.
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")


class LogSettings(SettingsGroup):
    """What is logged, and how. Logs go to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe event that is logged."
    )
    format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: console where standard error is a terminal, else json."
    )


def check_host(host: str) -> str:
    """`host`. Raises ValueError for what can be neither an address nor a name."""
    if _HOST.fullmatch(host) is None:
        raise ValueError("not a host")
    return host


class MetricsSettings(SettingsGroup):
    """Metrics and health of a worker, over HTTP. Off by default: a port belongs to one worker of a machine."""

    port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="Where /metrics and /healthz are served, one port a worker; none: nowhere.",
    )
    host: Annotated[str, Accepted("an address or name of this machine"), AfterValidator(check_host)] = Field(
        default="127.0.0.1",
        description="Address to serve them on, without a password; 0.0.0.0: on every interface, as in a container.",
    )
    queue_interval_s: Seconds = Field(
        default=5.0,
        ge=1,
        le=60,  # /healthz knows of a Redis that is away, or back, by the last reading
        description="How often the worker reads the queue's figures from Redis for them.",
    )


def _check_endpoint(url: str) -> str:
    parts = urlsplit(url)
    is_plain = url.isprintable() and " " not in url and "@" not in parts.netloc  # a password belongs in a header
    if parts.scheme not in {"http", "https"} or not parts.hostname or not is_plain:
        raise ValueError("not the URL of a collector")
    return url


_Endpoint = Annotated[str, Accepted("a URL such as http://collector:4318/v1/traces"), AfterValidator(_check_endpoint)]


class TracingSettings(SettingsGroup):
    """What is told to OpenTelemetry: spans of jobs, shards and some of their requests, sent by OTLP over HTTP.

    What is not set here (headers, certificates, resource attributes) OpenTelemetry reads itself, from its own OTEL_*
    variables.
    """

    enabled: bool = Field(default=False, description="Whether spans are made. Needs the extra `tracing`.")
    endpoint: _Endpoint | None = Field(
        default=None,
        description="Where spans are sent; none: OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318/v1/traces.",
    )
    sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of jobs that are traced, of those that come without a trace."
    )
    requests_per_shard: Annotated[int, Unit("requests")] = Field(
        default=16, ge=0, le=100_000, description="Requests of a shard that get spans of their own, evenly spread."
    )
    max_queued_spans: Annotated[int, Unit("spans")] = Field(
        default=8192, ge=512, le=1_000_000, description="Spans that wait for the collector; more are dropped."
    )
    export_timeout_s: Seconds = Field(
        default=5.0, ge=0.1, le=300, description="How long a batch of spans is tried to be sent, retries included."
    )
