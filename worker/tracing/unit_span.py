"""The span of a unit that is held."""

from __future__ import annotations

from collections.abc import Sequence

from worker.registry.prompt_record import PromptRecord
from worker.tracing.traced_request import TracedRequest


class UnitSpan:
    """Stands for a span where none is made; see OpenTelemetryUnitSpan. Thread-safe."""

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
        """A request of the unit ended."""

    def add_write(self, records: Sequence[PromptRecord], began_s: float) -> None:
        """Records were written to Redis, from `began_s` (time.monotonic()) until now."""

    def end(self, outcome: str, *, is_error: bool) -> None:
        """The unit is held no more."""
