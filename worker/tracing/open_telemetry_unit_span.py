"""The span of a held unit, by OpenTelemetry."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from worker.registry.claim import Claim
from worker.registry.prompt_record import PromptRecord
from worker.tracing.span_clock import SpanClock
from worker.tracing.traced_request import TracedRequest
from worker.tracing.unit_span import UnitSpan

logger = logging.getLogger(__name__)


class OpenTelemetryUnitSpan(UnitSpan):
    """`plan`, or `claim` of a shard, with its `prefill`, `decode` and `record` spans under it.

    However large the shard, at most `max_requests` of its requests have spans, every so many in the order in which
    they run, and a write has one if such a request is in it: 1 + 3 x `max_requests` at most.
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

    def add_request(self, request: TracedRequest) -> None:
        """See UnitSpan. `prefill` until the first token, `decode` from there on."""
        with _costing_spans_alone():
            self._add_request(request)

    def _add_request(self, request: TracedRequest) -> None:
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

    def add_write(self, records: Sequence[PromptRecord], began_s: float) -> None:
        """See UnitSpan."""
        if any(record.index in self._wanted for record in records):
            with _costing_spans_alone():
                self._add("record", began_s, None, {**self._ids, "millrace.records": len(records)})

    def end(self, outcome: str, *, is_error: bool) -> None:
        """See UnitSpan."""
        with _costing_spans_alone():
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


@contextmanager
def _costing_spans_alone() -> Iterator[None]:
    try:
        yield
    except Exception:  # a seam: between a record and its unit, where an error would end the worker
        logger.exception("a span is missing")


def _spread(indices: tuple[int, ...], most: int) -> frozenset[int]:
    """At most `most` of them, evenly spread."""
    step = -(-len(indices) // most) if most else 0
    return frozenset(indices[::step]) if step else frozenset()
