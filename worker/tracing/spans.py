"""Defines the spans of jobs and units, and makes what the settings ask for: OpenTelemetry's, or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from settings import SettingsError, TracingSettings
from worker.registry.leases import Claim, PromptRecord
from worker.schemas import SubmitOptions

# Not by name from the package index: what is called millrace there is not this project.
INSTALL_TRACING = 'pip install -e ".[tracing]" in the checkout'


class Tracing:
    """Makes no spans: tracing is off. The trace a job came with is handed on; see OpenTelemetryTracing. Thread-safe."""

    @contextmanager
    def submit(self, job_id: str, options: SubmitOptions) -> Iterator[str]:
        """While a job is submitted: the W3C trace context that goes with it, "" for none."""
        yield options.traceparent or ""

    def hold(self, claim: Claim) -> UnitSpan:
        """Begin the span of a unit that was claimed."""
        return UnitSpan(claim.traceparent)

    def close(self) -> None:
        """Send what waits, within 2 s."""


class UnitSpan:
    """The span of a unit. This one is not made; see OpenTelemetryUnitSpan. Thread-safe."""

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent  # W3C trace context of what is done for the unit; "": none

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits, by which logs and spans are found together; None: the job has no trace."""
        return self.traceparent.split("-")[1] if self.traceparent else None

    def wants(self, index: int) -> bool:
        """Whether the request of a line is to be added."""
        return False

    def add_request(self, request: TracedRequest) -> None:
        """Add the spans of a request of the unit that has ended."""

    def add_write(self, records: Sequence[PromptRecord], began_s: float) -> None:
        """Add the span of a write of records to Redis, from `began_s` (time.monotonic()) until now."""

    def end(self, outcome: str, *, is_error: bool) -> None:
        """End the span, as the unit is let go of."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that ended, in times (seconds of time.monotonic()) and numbers. It holds no word of the request."""

    index: int  # 0-based line of the job
    operation: str  # as OpenTelemetry's conventions for generative AI have it: chat, text_completion, embeddings
    arrived_s: float  # at the engine
    scheduled_s: float
    first_token_s: float | None  # None: nothing was generated
    finished_s: float
    input_tokens: int
    cached_tokens: int  # of these
    output_tokens: int
    finish_reasons: tuple[str, ...]
    error_type: str | None  # the name of its error's class


def make_tracing(settings: TracingSettings, *, service: str, instance: str, model_name: str = "") -> Tracing:
    """Tracing for one process. OpenTelemetry is imported only where it is on.

    `service` and `instance` name the process. Raises SettingsError where it is on and OpenTelemetry is not installed.
    """
    if not settings.enabled:
        return Tracing()
    try:
        from worker.tracing.open_telemetry import OpenTelemetryTracing, span_provider  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise SettingsError(
            "tracing.enabled",
            "true",
            f"{error.name} is not installed: {INSTALL_TRACING}",
            accepted="false, or true where the extra `tracing` is installed",
        ) from error
    provider = span_provider(settings, service=service, instance=instance)
    return OpenTelemetryTracing(provider, requests_per_shard=settings.requests_per_shard, model_name=model_name)
