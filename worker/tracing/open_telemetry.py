"""Sends the spans of jobs to OpenTelemetry: which are kept, how they leave, and what they say of a unit's requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context, get_current
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from settings import TracingSettings
from worker.registry.leases import Claim, PromptRecord
from worker.schemas import SubmitOptions
from worker.tracing.spans import TracedRequest, Tracing, UnitSpan

CLOSE_TIMEOUT_S = 2.0  # for what waits to reach the collector

logger = logging.getLogger(__name__)

EXPORT_INTERVAL_MS = 2000
MAX_BATCH_SPANS = 512


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
        except Exception:  # a seam: the unit runs without spans; raised here, its claim would be lost
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


@contextmanager
def _costing_spans_alone() -> Iterator[None]:
    try:
        yield
    except Exception:  # a seam: between a record and its unit, where an error would end the worker
        logger.exception("a span is missing")


class OpenTelemetryUnitSpan(UnitSpan):
    """`plan`, or `claim` of a shard, with its `prefill`, `decode` and `record` spans under it.

    However large the shard, at most `max_requests` of its requests, evenly spread, have spans, and a write has one if
    such a request is in it: at most 1 + 3 x `max_requests` spans.
    """

    def __init__(self, tracer: Tracer, parent: Context, claim: Claim, *, max_requests: int, model_name: str) -> None:
        self._tracer = tracer
        self._model_name = model_name
        self._clock = SpanClock()
        ids: dict[str, AttributeValue] = {"millrace.job_id": claim.ref.job_id}
        if not claim.ref.is_plan:
            ids["millrace.shard"] = int(claim.ref.unit)
        self._ids = ids
        self._span = tracer.start_span(
            "plan" if claim.ref.is_plan else "claim",
            parent,
            kind=SpanKind.CONSUMER,
            attributes={
                **ids,
                "millrace.tenant": claim.tenant,
                "millrace.priority": claim.priority,
                "millrace.prompts": len(claim.missing),
                "millrace.attempts": claim.attempts,
                "millrace.mode": claim.mode.value,
            },
            start_time=self._clock.now_ns(),
        )
        super().__init__(self.traceparent_of(self._span))
        self._context = set_span_in_context(self._span, Context())
        self._wanted = _spread(claim.missing, max_requests) if self._span.is_recording() else frozenset[int]()

    @staticmethod
    def traceparent_of(span: Span) -> str:
        """A span as W3C trace context; "" of one that stands for none."""
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span, Context()))
        return carrier.get("traceparent", "")

    def wants(self, index: int) -> bool:
        """See UnitSpan."""
        return index in self._wanted

    @_costing_spans_alone()
    def add_request(self, request: TracedRequest) -> None:
        """See UnitSpan. `prefill` until the first token, `decode` from there on."""
        common: dict[str, AttributeValue] = {
            **self._ids,
            "millrace.index": request.index,
            "gen_ai.operation.name": request.operation,
            "gen_ai.request.model": self._model_name,
        }
        prefill = {
            **common,
            "millrace.queued_s": round(request.scheduled_s - request.arrived_s, 6),
            "gen_ai.usage.input_tokens": request.input_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        }
        ended: dict[str, AttributeValue] = {"gen_ai.response.finish_reasons": request.finish_reasons}
        if request.error_type is not None:
            ended = {"error.type": request.error_type}
        if request.first_token_s is None:
            self._add("prefill", request.scheduled_s, request.finished_s, {**prefill, **ended})
            return
        decode = {**common, **ended, "gen_ai.usage.output_tokens": request.output_tokens}
        self._add("prefill", request.scheduled_s, request.first_token_s, prefill)
        self._add("decode", request.first_token_s, request.finished_s, decode)

    @_costing_spans_alone()
    def add_write(self, records: Sequence[PromptRecord], began_s: float) -> None:
        """See UnitSpan."""
        if any(record.index in self._wanted for record in records):
            self._add("record", began_s, None, {**self._ids, "millrace.records": len(records)})

    @_costing_spans_alone()
    def end(self, outcome: str, *, is_error: bool) -> None:
        """See UnitSpan."""
        self._span.set_attribute("millrace.outcome", outcome)
        if is_error:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._clock.now_ns())

    def _add(self, name: str, began_s: float, ended_s: float | None, attributes: dict[str, AttributeValue]) -> None:
        """After the fact; `ended_s` None: now."""
        span = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=self._clock.at_ns(began_s)
        )
        if "error.type" in attributes:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._clock.now_ns() if ended_s is None else self._clock.at_ns(ended_s))


def _spread(indices: tuple[int, ...], most: int) -> frozenset[int]:
    """At most `most` of them, evenly spread."""
    step = -(-len(indices) // most) if most else 0
    return frozenset(indices[::step]) if step else frozenset()


class SpanClock:
    """Turns time.monotonic() into nanoseconds since 1970, by the clock's time when it is made.

    A span and those under it share one: their order holds, even if the clock is set meanwhile.
    """

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def at_ns(self, monotonic_s: float) -> int:
        """Nanoseconds since 1970 at a monotonic time."""
        return self._offset_ns + round(monotonic_s * 1e9)

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._offset_ns + time.monotonic_ns()


def span_provider(settings: TracingSettings, *, service: str, instance: str) -> TracerProvider:
    """A provider that sends spans to the collector from a thread of its own: to end a span takes no wait.

    Spans wait for the collector in a queue of bounded length, from which the oldest are dropped. A job is not sampled
    where its submitter's trace is not. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before our own names.
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
