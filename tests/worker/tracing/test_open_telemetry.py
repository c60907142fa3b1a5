"""Spans as OpenTelemetry records them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode

from tests.support.registry import ok
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim
from worker.registry.lifecycle import RunMode
from worker.schemas import SubmitOptions
from worker.tracing.open_telemetry import OpenTelemetryTracing
from worker.tracing.spans import TracedRequest, UnitSpan

JOB = "s0-01234567-89ab-7cde-8f01-23456789abcd"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"00-{TRACE_ID}-b7ad6b7169203331-01"
NOT_SAMPLED = f"00-{TRACE_ID}-b7ad6b7169203331-00"


class Traced:
    """Tracing whose spans stay here."""

    def __init__(self, *, requests_per_shard: int = 4, sample_ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        self.provider = provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = OpenTelemetryTracing(provider, requests_per_shard=requests_per_shard, model_name="tiny")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        [span] = [span for span in self.spans if span.name == name]
        return span


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.tracing.close()


def claim_of(*, traceparent: str = "", num_prompts: int = 8, ref: UnitRef | None = None) -> Claim:
    return Claim(
        ref=ref or UnitRef.shard(JOB, 3),
        token="1:ab",
        mode=RunMode.RUN,
        time_left_s=None,
        attempts=0,
        priority=5,
        tenant="default",
        created_s=0,
        num_lines=num_prompts,
        missing=tuple(range(num_prompts)),
        traceparent=traceparent,
    )


def request_of(index: int, *, first_token_s: float | None = 3.0, error_type: str | None = None) -> TracedRequest:
    return TracedRequest(
        index=index,
        operation="chat",
        arrived_s=1.0,
        scheduled_s=2.0,
        first_token_s=first_token_s,
        finished_s=5.0,
        input_tokens=40,
        cached_tokens=32,
        output_tokens=7,
        finish_reasons=("stop",),
        error_type=error_type,
    )


def end(span: UnitSpan) -> None:
    span.end("done", is_error=False)


def length_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def test_a_submit_without_a_trace_begins_one(traced: Traced) -> None:
    with traced.tracing.submit(JOB, SubmitOptions(tenant="a", priority=2)) as traceparent:
        pass

    span = traced.named("submit")
    assert span.parent is None
    assert traceparent.split("-")[2] == id_of(span)
    assert dict(span.attributes or {}) == {
        "millrace.job_id": JOB, "millrace.tenant": "a", "millrace.priority": 2
    }  # fmt: skip


def test_a_submit_belongs_to_the_trace_it_is_given(traced: Traced) -> None:
    with traced.tracing.submit(JOB, SubmitOptions(traceparent=SAMPLED)) as traceparent:
        pass

    assert parent_of(traced.named("submit")) == "b7ad6b7169203331"
    assert traceparent.split("-")[1] == TRACE_ID


def test_a_submit_belongs_to_the_span_its_caller_is_in(traced: Traced) -> None:
    caller = traced.provider.get_tracer("a web service")
    with caller.start_as_current_span("a request of it"), traced.tracing.submit(JOB, SubmitOptions()):
        pass

    assert parent_of(traced.named("submit")) == id_of(traced.named("a request of it"))


def test_of_a_submit_that_fails_the_error_has_its_type_and_no_text(traced: Traced) -> None:
    with pytest.raises(ValueError, match="secret"), traced.tracing.submit(JOB, SubmitOptions()):
        raise ValueError("secret")

    span = traced.named("submit")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "ValueError"
    assert "secret" not in span.to_json()


def test_a_claim_belongs_to_the_trace_of_its_job(traced: Traced) -> None:
    span = traced.tracing.hold(claim_of(traceparent=SAMPLED))
    end(span)

    claim = traced.named("claim")
    assert parent_of(claim) == "b7ad6b7169203331"
    assert (span.trace_id, span.traceparent.split("-")[2]) == (TRACE_ID, id_of(claim))
    assert (claim.attributes or {})["millrace.shard"] == 3
    assert (claim.attributes or {})["millrace.outcome"] == "done"


@pytest.mark.parametrize("traceparent", ["", "00-0-0-0", f"00-{'0' * 32}-b7ad6b7169203331-01", "garbage"])
def test_a_plan_without_a_trace_begins_one(traced: Traced, traceparent: str) -> None:
    end(traced.tracing.hold(claim_of(traceparent=traceparent, ref=UnitRef.plan(JOB))))

    assert traced.named("plan").parent is None


def test_a_request_is_a_prefill_and_a_decode_under_its_claim(traced: Traced) -> None:
    span = traced.tracing.hold(claim_of())
    span.add_request(request_of(0))
    end(span)

    prefill, decode = traced.named("prefill"), traced.named("decode")
    assert parent_of(prefill) == parent_of(decode) == id_of(traced.named("claim"))
    assert prefill.end_time == decode.start_time
    assert (length_s(prefill), length_s(decode)) == pytest.approx((1.0, 2.0))
    assert dict(prefill.attributes or {}) == {
        "millrace.job_id": JOB,
        "millrace.shard": 3,
        "millrace.index": 0,
        "millrace.queued_s": 1.0,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.cache_read.input_tokens": 32,
    }
    assert (decode.attributes or {})["gen_ai.usage.output_tokens"] == 7
    assert (decode.attributes or {})["gen_ai.response.finish_reasons"] == ("stop",)


def test_a_request_that_generates_nothing_is_a_prefill(traced: Traced) -> None:
    span = traced.tracing.hold(claim_of())
    span.add_request(request_of(0, first_token_s=None, error_type="NonFiniteLogits"))
    end(span)

    assert [ended.name for ended in traced.spans] == ["prefill", "claim"]
    prefill = traced.named("prefill")
    assert length_s(prefill) == pytest.approx(3.0)
    assert (prefill.attributes or {})["error.type"] == "NonFiniteLogits"
    assert prefill.status.status_code is StatusCode.ERROR


def test_times_are_times_of_day(traced: Traced) -> None:
    before_s = time.time()
    span, began_s = traced.tracing.hold(claim_of()), time.monotonic()
    span.add_write([ok(0)], began_s)
    end(span)
    after_s = time.time()

    record = traced.named("record")
    assert record.start_time is not None
    assert before_s - 0.01 < record.start_time / 1e9 < after_s + 0.01


def test_of_a_large_shard_some_requests_are_wanted_evenly_spread(traced: Traced) -> None:
    span = traced.tracing.hold(claim_of(num_prompts=1000))

    assert [index for index in range(1000) if span.wants(index)] == [0, 250, 500, 750]
    end(span)


@pytest.mark.parametrize(("most", "num_prompts", "num_wanted"), [(4, 5, 3), (4, 3, 3), (0, 5, 0), (1, 5, 1), (4, 0, 0)])
def test_never_more_are_wanted_than_asked_for(most: int, num_prompts: int, num_wanted: int) -> None:
    span = Traced(requests_per_shard=most).tracing.hold(claim_of(num_prompts=num_prompts))

    assert sum(map(span.wants, range(num_prompts))) == num_wanted
    end(span)


def test_a_write_has_a_span_if_a_wanted_request_is_in_it(traced: Traced) -> None:
    span = traced.tracing.hold(claim_of(num_prompts=8))  # 0, 2, 4, 6

    span.add_write([ok(1), ok(3)], time.monotonic())
    assert traced.spans == []
    span.add_write([ok(5), ok(6)], time.monotonic())
    end(span)

    assert (traced.named("record").attributes or {})["millrace.records"] == 2
    assert parent_of(traced.named("record")) == id_of(traced.named("claim"))


def test_what_its_submitter_did_not_sample_makes_no_span(traced: Traced) -> None:
    with traced.tracing.submit(JOB, SubmitOptions(traceparent=NOT_SAMPLED)) as traceparent:
        span = traced.tracing.hold(claim_of(traceparent=traceparent))
        assert not span.wants(0)
        end(span)

    assert traced.spans == []
    assert traceparent.endswith("-00")  # so that no worker samples it either
    assert traceparent.split("-")[1] == TRACE_ID


def test_of_jobs_without_a_trace_the_ratio_decides_and_their_shards_follow() -> None:
    none, every = Traced(sample_ratio=0.0), Traced()
    with none.tracing.submit(JOB, SubmitOptions()) as traceparent:
        end(every.tracing.hold(claim_of(traceparent=traceparent)))

    assert none.spans == every.spans == []


def test_a_unit_that_is_lost_is_an_error(traced: Traced) -> None:
    traced.tracing.hold(claim_of()).end("no longer ours", is_error=True)

    assert traced.named("claim").status.status_code is StatusCode.ERROR


def test_a_fault_of_tracing_costs_spans_and_nothing_else(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    span = traced.tracing.hold(claim_of(traceparent=SAMPLED))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no clock")

    monkeypatch.setattr("worker.tracing.open_telemetry.SpanClock.at_ns", fail)
    monkeypatch.setattr("worker.tracing.open_telemetry.SpanClock.now_ns", fail)
    span.add_request(request_of(0))
    end(span)
    assert traced.tracing.hold(claim_of(traceparent=SAMPLED)).traceparent == SAMPLED
    assert traced.spans == []
    assert "a span is missing" in caplog.text
