"""When traces are made, and the trace context of a job on its way through the registry to its requests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.errors import NonFiniteLogits
from engine.request import Completion, FinishReason, RequestOutput, RequestTimings
from settings import LimitSettings, SettingsError, TracingSettings
from tests.support.registry import TestRegistry, must_claim
from worker.lines.parse import parse_request_line
from worker.lines.request_line import RequestLine
from worker.registry.keys import UnitRef
from worker.registry.leases import NewShard
from worker.registry.lifecycle import PutStatus
from worker.runtime.held_units import trace_request
from worker.schemas import SubmitOptions
from worker.tracing.spans import TracedRequest, Tracing, UnitSpan, make_tracing

JOB = "s0-01234567-89ab-7cde-8f01-23456789abcd"
ROOT = Path(__file__).resolve().parents[3]

SUBMIT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PLAN = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"

TIMINGS = RequestTimings(arrived_s=1.0, scheduled_s=2.0, first_token_s=3.0, finished_s=4.0)
OUTPUT = RequestOutput(
    request_id="r",
    num_prompt_tokens=40,
    num_cached_tokens=32,
    completions=tuple(Completion(n, "words", (1, 2, 3), FinishReason.LENGTH, None, None) for n in range(2)),
    timings=TIMINGS,
)


def test_it_is_off_unless_it_is_asked_for() -> None:
    tracing = make_tracing(TracingSettings(), service="millrace-worker", instance="w")

    assert type(tracing) is Tracing
    with tracing.submit(JOB, SubmitOptions()) as traceparent:
        assert traceparent == ""


def test_without_the_packages_tracing_names_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from settings import TracingSettings
from worker.async_client import AsyncBatchClient
from worker.client import BatchClient
from worker.runtime.runtime import WorkerRuntime
BatchClient("redis://127.0.0.1:1").close()
try:
    BatchClient("redis://127.0.0.1:1", tracing=TracingSettings(enabled=True))
except ValueError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)

    assert done.stdout.startswith("SettingsError tracing.enabled=true: opentelemetry")
    assert 'is not installed: pip install -e ".[tracing]"' in done.stdout


def test_a_defect_of_ours_is_not_taken_for_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "worker.tracing.open_telemetry", None)

    with pytest.raises(ModuleNotFoundError):
        make_tracing(TracingSettings(enabled=True), service="s", instance="i")


def test_the_error_names_setting_value_and_what_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("worker.tracing.open_telemetry", "worker.tracing.open_telemetry"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(SettingsError) as caught:
        make_tracing(TracingSettings(enabled=True), service="s", instance="i")

    assert (caught.value.name, caught.value.value) == ("tracing.enabled", "true")
    assert caught.value.accepted is not None
    assert "false" in caught.value.accepted


def test_a_plan_has_that_of_the_submit(registry: TestRegistry) -> None:
    job_id = registry.submit([b"x"], SubmitOptions(traceparent=SUBMIT))

    assert must_claim(registry.leases(), UnitRef.plan(job_id)).traceparent == SUBMIT


@pytest.mark.parametrize(("of_plan", "of_shard"), [(PLAN, PLAN), ("", SUBMIT)])
def test_a_shard_has_that_of_the_plan_which_may_have_made_none(
    registry: TestRegistry, of_plan: str, of_shard: str
) -> None:
    job_id, leases = registry.submit([b"x"], SubmitOptions(traceparent=SUBMIT)), registry.leases()
    plan = must_claim(leases, UnitRef.plan(job_id))

    assert leases.planned(replace(plan, traceparent=of_plan), [NewShard([0])], ageing_s=60.0) is PutStatus.UNIT_DONE

    assert must_claim(leases, UnitRef.shard(job_id, 0)).traceparent == of_shard


def test_a_job_may_come_without(registry: TestRegistry) -> None:
    job_id = registry.running_job([0])

    assert must_claim(registry.leases(), UnitRef.shard(job_id, 0)).traceparent == ""


def test_a_job_of_before_there_were_traces_has_none(registry: TestRegistry) -> None:
    job_id = registry.running_job([0])
    registry.redis.hdel(registry.keys.job(job_id), "trace")

    assert must_claim(registry.leases(), UnitRef.shard(job_id, 0)).traceparent == ""


@pytest.mark.parametrize("bad", ["", "garbage", SUBMIT.upper(), f"01{SUBMIT[2:]}", f"{SUBMIT}-more", f"{SUBMIT}\n"])
def test_what_is_no_trace_context_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError, match="traceparent"):
        SubmitOptions(traceparent=bad)


class RecordingSpan(UnitSpan):
    """Notes the requests it is told of."""

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
