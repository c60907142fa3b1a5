"""OpenTelemetry's side: which spans are kept, and how they leave."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from settings import TracingSettings

EXPORT_INTERVAL_MS = 2000
MAX_BATCH_SPANS = 512


def span_provider(settings: TracingSettings, *, service: str, instance: str) -> TracerProvider:
    """A provider that sends spans to the collector from a thread of its own; whoever ends a span never waits.

    What the collector does not take in time waits in a queue of bounded length and is dropped, the oldest first.
    A job whose submitter's trace is not sampled is not either. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go
    before our own names.
    """
    own = {"service.name": service, "service.instance.id": instance}
    resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        resource=resource,
        shutdown_on_exit=False,  # it would wait for a collector that is away
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(endpoint=settings.endpoint, timeout=settings.export_timeout_s),
            max_queue_size=settings.max_queued_spans,
            schedule_delay_millis=EXPORT_INTERVAL_MS,
            max_export_batch_size=MAX_BATCH_SPANS,
        )
    )
    return provider
