from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import NonFiniteLogits
from engine.request import Completion, FinishReason, RequestOutput, RequestTimings
from settings import LimitSettings
from worker.lines.parse import parse_request_line
from worker.lines.request_line import RequestLine
from worker.runtime.held_units import trace_request
from worker.tracing.spans import TracedRequest, UnitSpan

TIMINGS = RequestTimings(arrived_s=1.0, scheduled_s=2.0, first_token_s=3.0, finished_s=4.0)
OUTPUT = RequestOutput(
    request_id="r",
    num_prompt_tokens=40,
    num_cached_tokens=32,
    completions=tuple(Completion(n, "words", (1, 2, 3), FinishReason.LENGTH, None, None) for n in range(2)),
    timings=TIMINGS,
)


class RecordingSpan(UnitSpan):
    """Remembers its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[TracedRequest] = []

    def add_request(self, request: TracedRequest) -> None:
        self.requests.append(request)


def line_of(url: str, body: str) -> RequestLine:
    raw = f'{{"custom_id": "words", "method": "POST", "url": "{url}", "body": {body}}}'
    return parse_request_line(raw.encode(), 7, LimitSettings())


LINE = line_of("/v1/completions", '{"prompt": "words"}')


def traced(output: RequestOutput, line: RequestLine = LINE) -> list[TracedRequest]:
    span = RecordingSpan()
    trace_request(span, line, output)
    return span.requests


def test_a_request_is_told_in_numbers() -> None:
    [request] = traced(OUTPUT)

    assert request == TracedRequest(
        index=7,
        operation="text_completion",
        arrived_s=1.0,
        scheduled_s=2.0,
        first_token_s=3.0,
        finished_s=4.0,
        input_tokens=40,
        cached_tokens=32,
        output_tokens=6,
        finish_reasons=("length", "length"),
        error_type=None,
    )
    assert "words" not in repr(request)


@pytest.mark.parametrize(
    ("url", "body", "operation"),
    [
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "words"}]}', "chat"),
        ("/v1/embeddings", '{"input": "words"}', "embeddings"),
    ],
)
def test_endpoints_have_the_names_of_the_conventions(url: str, body: str, operation: str) -> None:
    [request] = traced(OUTPUT, line_of(url, body))

    assert request.operation == operation


def test_an_error_is_its_type() -> None:
    [request] = traced(replace(OUTPUT, completions=(), error=NonFiniteLogits("words")))

    assert (request.error_type, request.finish_reasons, request.output_tokens) == ("NonFiniteLogits", (), 0)
    assert "words" not in repr(request)


@pytest.mark.parametrize("timings", [None, replace(TIMINGS, scheduled_s=None, first_token_s=None)])
def test_what_was_not_run_is_not_told(timings: RequestTimings | None) -> None:
    assert traced(replace(OUTPUT, timings=timings)) == []
