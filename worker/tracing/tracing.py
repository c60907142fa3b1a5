"""Spans, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from worker.registry.claim import Claim
from worker.schemas.submit_options import SubmitOptions
from worker.tracing.unit_span import UnitSpan


class Tracing:
    """Makes no spans: tracing is off. The trace a job came with is handed on; see OpenTelemetryTracing. Thread-safe."""

    @contextmanager
    def submit(self, job_id: str, options: SubmitOptions) -> Iterator[str]:
        """While a job is submitted: the W3C trace context that goes with it, "" for none."""
        yield options.traceparent or ""

    def hold(self, claim: Claim) -> UnitSpan:
        """A unit was claimed."""
        return UnitSpan(claim.traceparent)

    def close(self) -> None:
        """Send what waits, within 2 s."""
