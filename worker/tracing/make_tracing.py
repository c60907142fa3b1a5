"""Spans as the settings ask for them."""

from __future__ import annotations

from settings import SettingsError, TracingSettings
from worker.tracing.tracing import Tracing

# Not by name from the package index: what is called millrace there is not this project.
INSTALL_TRACING = 'pip install -e ".[tracing]" in the checkout'


def make_tracing(settings: TracingSettings, *, service: str, instance: str, model_name: str = "") -> Tracing:
    """Tracing for one process. OpenTelemetry is imported only where it is on.

    `service` and `instance` name the process, `model_name` the model that it serves. Raises SettingsError where tracing
    is on and OpenTelemetry is not installed.
    """
    if not settings.enabled:
        return Tracing()
    try:
        from worker.tracing.open_telemetry_tracing import OpenTelemetryTracing  # noqa: PLC0415
        from worker.tracing.span_provider import span_provider  # noqa: PLC0415
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
