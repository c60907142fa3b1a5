"""Requests that ended, for their unit's span."""

from __future__ import annotations

from engine.request import RequestOutput
from worker.lines.endpoint import Endpoint
from worker.lines.request_line import RequestLine
from worker.tracing.traced_request import TracedRequest
from worker.tracing.unit_span import UnitSpan

_OPERATIONS = {
    Endpoint.CHAT_COMPLETIONS: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
}


def trace_request(span: UnitSpan, line: RequestLine, output: RequestOutput) -> None:
    """Add a request, unless nothing was run for it: it was refused, or an equal one was run."""
    timings = output.timings
    if timings is None or timings.scheduled_s is None:
        return
    span.add_request(
        TracedRequest(
            index=line.index,
            operation=_OPERATIONS[line.endpoint],
            arrived_s=timings.arrived_s,
            scheduled_s=timings.scheduled_s,
            first_token_s=timings.first_token_s,
            finished_s=timings.finished_s,
            input_tokens=output.num_prompt_tokens,
            cached_tokens=output.num_cached_tokens,
            output_tokens=sum(len(completion.token_ids) for completion in output.completions),
            finish_reasons=tuple(completion.finish_reason.value for completion in output.completions),
            error_type=None if output.error is None else type(output.error).__name__,
        )
    )
