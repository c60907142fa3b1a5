"""What is told to OpenTelemetry."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field

from settings.accepted import Accepted
from settings.group_config import GROUP_CONFIG
from settings.units import Seconds, Unit


def _check_endpoint(url: str) -> str:
    parts = urlsplit(url)
    is_plain = url.isprintable() and " " not in url and "@" not in parts.netloc  # a password belongs into a header
    if parts.scheme not in {"http", "https"} or not parts.hostname or not is_plain:
        raise ValueError("not the URL of a collector")
    return url


_Endpoint = Annotated[str, Accepted("a URL such as http://collector:4318/v1/traces"), AfterValidator(_check_endpoint)]


class TracingSettings(BaseModel):
    """What is told to OpenTelemetry: spans of jobs, shards and some of their requests, sent by OTLP over HTTP.

    What is not set here (headers, certificates, resource attributes) OpenTelemetry reads itself, from its own OTEL_*
    variables.
    """

    model_config = GROUP_CONFIG

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
