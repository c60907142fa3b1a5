"""Spans of a job that runs, as a collector gets them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from settings import RedisSettings, TracingSettings
from tests.support.fake_engine import FAIL
from tests.support.monitoring import Collector, running_collector
from tests.support.redis_servers import free_port
from tests.support.workers import FAKE_WORKER_STOP_TIMEOUT_S, WorkerProcesses
from worker.client import BatchClient
from worker.schemas import JobState

WAIT_S = 30
CANARY = "canary-sings-7c1e"
LINES = [
    {
        "custom_id": f"{CANARY} {number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"{CANARY} {number}", "metadata": {"note": CANARY}},
    }
    for number in range(25)
]
OTHER_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


def traced_client(redis_url: str, endpoint: str) -> BatchClient:
    return BatchClient(
        RedisSettings(url=SecretStr(redis_url)), tracing=TracingSettings(enabled=True, endpoint=endpoint)
    )


def test_a_job_is_one_trace_from_submit_to_record(
    redis_url: str, workers: WorkerProcesses, collector: Collector
) -> None:
    worker = workers.start(tracing__enabled="on", tracing__endpoint=collector.url, tracing__requests_per_shard="3")
    with traced_client(redis_url, collector.url) as client:
        job_id = client.submit([*LINES[:-1], {"prompt": f"{FAIL} {CANARY}"}], metadata={"note": CANARY})
        assert client.wait(job_id, WAIT_S).status is JobState.COMPLETED
    worker.terminate()
    assert worker.wait(FAKE_WORKER_STOP_TIMEOUT_S) == 0

    [submit], [plan], claims = collector.named("submit"), collector.named("plan"), collector.named("claim")
    assert {span.trace_id for span in collector.spans} == {submit.trace_id}
    assert (submit.parent_id, plan.parent_id) == ("", submit.span_id)
    assert {claim.parent_id for claim in claims} == {plan.span_id}
    assert sorted(claim.attributes["millrace.shard"] for claim in claims) == [0, 1, 2]
    assert {span.attributes["millrace.job_id"] for span in collector.spans} == {job_id}
    assert (submit.service, plan.service) == ("millrace-producer", "millrace-worker")
    counts = Counter(span.name for span in collector.spans)
    assert (counts["prefill"], counts["decode"]) == (9, 8)  # 3 of each shard, one of which fails: it sorts first
    assert [span.name for span in collector.spans if span.is_error] == ["prefill"]
    assert 3 <= counts["record"] <= 9

    assert submit.began_ns < plan.began_ns < min(claim.began_ns for claim in claims)
    by_id = {span.span_id: span for span in claims}
    requests: dict[int, dict[str, tuple[int, int]]] = {}
    for span in collector.spans:
        if span.name in ("prefill", "decode", "record"):
            claim = by_id[span.parent_id]
            assert claim.began_ns <= span.began_ns <= span.ended_ns <= claim.ended_ns, span
        if "millrace.index" in span.attributes:
            requests.setdefault(span.attributes["millrace.index"], {})[span.name] = span.began_ns, span.ended_ns
    for spans in requests.values():
        if "decode" in spans:
            assert spans["prefill"][1] == spans["decode"][0]

    assert not any(CANARY.encode() in raw for raw in collector.raw)
    logged = [json.loads(line) for line in workers.log().splitlines()]
    assert {event["trace_id"] for event in logged if event.get("job_id") == job_id} == {submit.trace_id}


def test_a_producer_without_tracing_may_name_its_trace(
    redis_url: str, workers: WorkerProcesses, collector: Collector
) -> None:
    worker = workers.start(tracing__enabled="on", tracing__endpoint=collector.url)
    with BatchClient(redis_url) as client:
        named, unnamed = client.submit(LINES[:1], traceparent=OTHER_TRACE), client.submit(LINES[:1])
        for job_id in (named, unnamed):
            client.wait(job_id, WAIT_S)
    worker.terminate()
    assert worker.wait(FAKE_WORKER_STOP_TIMEOUT_S) == 0

    traces: dict[str, set[str]] = {}
    for span in collector.spans:
        traces.setdefault(span.attributes["millrace.job_id"], set()).add(span.trace_id)
    assert traces[named] == {OTHER_TRACE.split("-")[1]}
    assert len(traces[unnamed]) == 1  # its plan's, which its shards go on with
    assert traces[unnamed] != traces[named]
    assert collector.named("submit") == []


def test_a_worker_without_tracing_hands_the_trace_on_in_its_logs(redis_url: str, workers: WorkerProcesses) -> None:
    workers.start()
    with BatchClient(redis_url) as client:
        job_id = client.submit(LINES[:1], traceparent=OTHER_TRACE)
        client.wait(job_id, WAIT_S)

    events = [event for event in map(json.loads, workers.log().splitlines()) if event.get("job_id") == job_id]
    assert {event["trace_id"] for event in events} == {OTHER_TRACE.split("-")[1]}


def test_a_collector_that_is_away_costs_a_line_and_no_job(redis_url: str, workers: WorkerProcesses) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}/v1/traces"
    worker = workers.start(tracing__enabled="on", tracing__endpoint=endpoint, tracing__export_timeout_s="1.5")
    with traced_client(redis_url, endpoint) as client:
        job_ids = [client.submit(LINES) for _ in range(3)]
        assert all(client.wait(job_id, WAIT_S).status is JobState.COMPLETED for job_id in job_ids)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 20  # not the 30 that the SDK would wait
    worker.terminate()
    assert worker.wait(FAKE_WORKER_STOP_TIMEOUT_S) == 0

    events = [json.loads(line) for line in workers.log().splitlines()]
    of_tracing = [event for event in events if event["logger"].startswith("opentelemetry")]
    assert len(of_tracing) == 1
    assert endpoint.split("/")[2].split(":")[1] in of_tracing[0]["event"]
