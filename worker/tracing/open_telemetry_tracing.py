"""Spans of jobs, by OpenTelemetry."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context, get_current
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from worker.registry.claim import Claim
from worker.schemas.submit_options import SubmitOptions
from worker.tracing.open_telemetry_unit_span import OpenTelemetryUnitSpan
from worker.tracing.tracing import Tracing
from worker.tracing.unit_span import UnitSpan

CLOSE_TIMEOUT_S = 2.0  # for what waits to reach the collector

logger = logging.getLogger(__name__)


class OpenTelemetryTracing(Tracing):
    """Makes spans with OpenTelemetry's SDK. No attribute holds a word of a line or an answer."""

    def __init__(self, provider: TracerProvider, *, requests_per_shard: int, model_name: str = "") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("millrace")
        self._requests_per_shard = requests_per_shard
        self._model_name = model_name

    @contextmanager
    def submit(self, job_id: str, options: SubmitOptions) -> Iterator[str]:
        """See Tracing. Under the options' trace, else under the caller's current span, else a trace of its own."""
        attributes: dict[str, AttributeValue] = {
            "millrace.job_id": job_id,
            "millrace.tenant": options.tenant,
            "millrace.priority": options.priority,
        }
        parent = _context_of(options.traceparent) if options.traceparent else get_current()
        span = self._tracer.start_span("submit", parent, kind=SpanKind.PRODUCER, attributes=attributes)
        # Neither the error's text nor its traceback: they may hold what was to be submitted.
        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield OpenTelemetryUnitSpan.traceparent_of(span)
            except BaseException as error:
                span.set_attribute("error.type", type(error).__qualname__)
                span.set_status(Status(StatusCode.ERROR))
                raise

    def hold(self, claim: Claim) -> UnitSpan:
        """See Tracing."""
        try:
            return OpenTelemetryUnitSpan(
                self._tracer,
                _context_of(claim.traceparent),
                claim,
                max_requests=self._requests_per_shard,
                model_name=self._model_name,
            )
        except Exception:  # a seam: a unit without spans, not a claim that nobody holds
            logger.exception("no span for a unit")
            return UnitSpan(claim.traceparent)

    def close(self) -> None:
        """See Tracing."""
        # On a thread: the SDK's own limit is 30 s, and a collector that is away must not keep the process from ending.
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def _context_of(traceparent: str) -> Context:
    """Where spans under this trace context belong; of "", or one that is not valid, in traces of their own."""
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
