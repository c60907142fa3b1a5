"""The prompts of a shard, and units that report what becomes of them."""

from __future__ import annotations

import json
import logging
import re
from array import array
from contextlib import suppress
from dataclasses import replace

import pytest
import structlog

from engine.request import Request, RequestOutput
from settings import LimitSettings, ModelSettings
from tests.support.fake_engine import FakeEngine, completion, request_output
from tests.support.registry import TestRegistry, must_claim
from tests.support.request_lines import batch_line, chat_line
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, NewShard, PromptRecord
from worker.registry.lifecycle import PutStatus, StopReason
from worker.requests.served_model import Prepared, ServedModel
from worker.runtime.held_units import HeldUnit, reported
from worker.runtime.shard import ShardPrompts
from worker.schemas import SubmitOptions
from worker.tracing.spans import UnitSpan

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def _prompts(
    claim: Claim, chat_template: str | None = None, *, max_record_bytes: int = LimitSettings().max_record_bytes
) -> ShardPrompts:
    model = ServedModel(FakeEngine(chat_template=chat_template), ModelSettings(name="fake"))
    return ShardPrompts(claim, model, limits=LimitSettings(max_record_bytes=max_record_bytes))


def _request(claim: Claim) -> Request:
    ((_, request),) = _prepared(_prompts(claim).prepare([(0, b'{"prompt": "a"}')]))
    assert isinstance(request, Request)
    return request


def _prepared(items: list[Prepared | PromptRecord]) -> list[Prepared]:
    return [item for item in items if not isinstance(item, PromptRecord)]


def _request_id(claim: Claim) -> str:
    return _request(claim).request_id


def _claim(registry: TestRegistry, job_id: str) -> Claim:
    registry.intake().stage(job_id, 0, [b'{"prompt": "a"}'])
    registry.intake().submit(job_id, 1, SubmitOptions())
    leases = registry.leases()
    assert (
        leases.planned(must_claim(leases, UnitRef.plan(job_id)), [NewShard([0], model="fake")], ageing_s=60.0)
        is PutStatus.UNIT_DONE
    )
    return must_claim(leases, UnitRef.shard(job_id, 0))


def test_a_job_submitted_again_after_a_flush_has_other_request_ids(registry: TestRegistry) -> None:
    job_id = registry.keys.new_job_id()
    first = _claim(registry, job_id)
    registry.redis.flushall()
    second = _claim(registry, job_id)
    assert first.token.partition(":")[0] == second.token.partition(":")[0]
    assert _request_id(first) != _request_id(second)
    assert _request_id(first) == _request_id(first)


def test_a_template_that_writes_the_time_writes_that_of_the_job(registry: TestRegistry) -> None:
    claim = replace(_claim(registry, registry.keys.new_job_id()), created_s=1_700_000_000)
    prompts = _prompts(claim, "{{ strftime_now('%d %b %Y %H:%M') }}")

    ((_, request),) = _prepared(prompts.prepare([(0, chat_line())]))

    assert isinstance(request, Request)
    assert bytes(request.prompt_token_ids) == b"14 Nov 2023 22:13"


def test_lines_found_to_mean_the_model_run_whatever_they_name(registry: TestRegistry) -> None:
    prompts = _prompts(_claim(registry, registry.keys.new_job_id()))
    assert len(_prepared(prompts.prepare([(0, b'{"prompt": "b", "model": "an alias of before"}')]))) == 1


def test_lines_that_cannot_be_run_become_records_and_order_is_kept(registry: TestRegistry) -> None:
    raw_lines = [b'{"prompt": "a"}', b"{", None, b'{"prompt": "b", "model": "other"}', b'{"prompt": "c"}']
    claim = replace(_claim(registry, registry.keys.new_job_id()), model="")  # as an older version planned it
    items = _prompts(claim).prepare(enumerate(raw_lines, 5))

    requests = [request for _, request in _prepared(items) if isinstance(request, Request)]
    assert [request.prompt_token_ids for request in requests] == [[97], [99]]
    assert [line.index for line, _ in _prepared(items)] == [5, 9]
    records = [item for item in items if isinstance(item, PromptRecord)]
    codes = [json.loads(record.record)["response"]["body"]["error"]["code"] for record in records]
    assert codes == ["invalid_json_line", "missing_line", "model_not_found"]
    assert [record.index for record in records] == [6, 7, 8]


def test_a_record_that_is_too_large_says_what_to_ask_less_of(registry: TestRegistry) -> None:
    prompts = _prompts(_claim(registry, registry.keys.new_job_id()), max_record_bytes=5000)
    raw = b'{"prompt": "a", "logprobs": 20, "n": 2, "max_tokens": 9, "custom_id": "mine"}'
    [(line, request)] = _prepared(prompts.prepare([(0, raw)]))

    record = prompts.of_output(line, request_output(request.request_id, completion("x" * 6000)))

    whole = json.loads(record.record)
    assert (whole["custom_id"], whole["response"]["status_code"]) == ("mine", 400)
    error = whole["response"]["body"]["error"]
    assert (error["code"], error["param"]) == ("record_too_large", "logprobs")
    assert re.fullmatch(
        r"the record would have 6,\d{3} bytes, limit 5,000 \(limits\.max_record_bytes\): "
        "ask for less by logprobs, n, max_tokens",
        error["message"],
    )
    # What it cost is counted all the same.
    assert (record.outcome, record.prompt_tokens, record.cached_tokens, record.output_tokens) == ("error", 5, 4, 2)


def test_embeddings_that_are_too_large_are_to_be_fewer_or_base64(registry: TestRegistry) -> None:
    prompts = _prompts(_claim(registry, registry.keys.new_job_id()), max_record_bytes=4096)
    raw = batch_line("/v1/embeddings", {"input": ["a", "b"]})
    [(line, request)] = _prepared(prompts.prepare([(0, raw)]))
    output = RequestOutput(
        request.request_id, 2, 0, (), embeddings=(array("f", [0.125] * 500), array("f", [0.125] * 500))
    )

    error = json.loads(prompts.of_output(line, output).record)["response"]["body"]["error"]

    assert (error["code"], error["param"]) == ("record_too_large", "input")
    assert error["message"].endswith("ask for fewer inputs in a line, or encoding_format base64, which takes half")


def test_an_unexpected_error_over_a_prompt_is_its_record_and_logged(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = _prompts(_claim(registry, registry.keys.new_job_id()))

    def failing(*_arguments: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("worker.requests.builder._sampling_params", failing)
    (record,) = prompts.prepare([(3, b'{"prompt": "a"}')])

    assert isinstance(record, PromptRecord)
    assert json.loads(record.record)["response"]["status_code"] == 500
    [failed] = [record for record in caplog.records if "could not be prepared" in record.message]
    assert failed.__dict__["index"] == 3
    assert "ZeroDivisionError" in caplog.text


class RecordingSpan(UnitSpan):
    """Notes how it was ended."""

    def __init__(self) -> None:
        super().__init__(TRACEPARENT)
        self.ends: list[tuple[str, bool]] = []

    def end(self, outcome: str, *, is_error: bool) -> None:
        self.ends.append((outcome, is_error))


def held_unit(registry: TestRegistry, *, is_plan: bool = False) -> tuple[HeldUnit, RecordingSpan]:
    span = RecordingSpan()
    ref = UnitRef.plan(registry.submit([b"x"])) if is_plan else UnitRef.shard(registry.running_job([0, 1]), 0)
    return HeldUnit(must_claim(registry.leases(), ref), message_id="m", span=span), span


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.message) for record in caplog.records]


@pytest.mark.parametrize(
    ("reason", "outcome", "is_error"),
    [
        (None, "done", False),
        (StopReason.CANCELLED, "cancelled", False),
        (StopReason.SENT_AWAY, "given back", False),
        (StopReason.RELEASED, "given back", False),
        (StopReason.FAILED, "failed", True),
        (StopReason.ENGINE_FAILED, "given back, the engine failed", True),
        (StopReason.FENCED, "no longer ours", True),
    ],
)
def test_a_shard_is_logged_and_traced_from_its_claim_to_its_outcome(
    registry: TestRegistry,
    caplog: pytest.LogCaptureFixture,
    reason: StopReason | None,
    outcome: str,
    is_error: bool,
) -> None:
    caplog.set_level(logging.INFO)
    held, span = held_unit(registry)

    with reported(held):
        assert span.ends == []
        if reason is not None:
            held.stop(reason)

    assert messages(caplog) == [("INFO", "shard claimed"), ("WARNING" if is_error else "INFO", f"shard {outcome}")]
    assert caplog.records[0].__dict__["prompts"] == 2
    assert span.ends == [(outcome, is_error)]


def test_an_error_met_while_it_is_given_back_is_no_failure_of_it(registry: TestRegistry) -> None:
    held, span = held_unit(registry)

    with suppress(OSError), reported(held):
        held.stop(StopReason.RELEASED)
        raise OSError("Redis is away")

    assert span.ends == [("given back", False)]


def test_one_that_was_written_before_it_was_to_stop_is_done(registry: TestRegistry) -> None:
    held, span = held_unit(registry)

    with reported(held):
        held.set_written()
        held.stop(StopReason.RELEASED)

    assert span.ends == [("done", False)]


def test_one_over_which_something_is_raised_has_failed(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    held, span = held_unit(registry)

    with suppress(ZeroDivisionError), reported(held):
        raise ZeroDivisionError

    assert messages(caplog) == [("WARNING", "shard failed")]  # at the level of warnings
    assert span.ends == [("failed", True)]


def test_a_plan_that_goes_well_is_not_mentioned(registry: TestRegistry, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    held, span = held_unit(registry, is_plan=True)

    with reported(held):
        pass

    assert messages(caplog) == []
    assert span.ends == [("done", False)]


def test_whatever_is_logged_meanwhile_has_job_shard_and_trace(registry: TestRegistry) -> None:
    held, _ = held_unit(registry)

    with reported(held):
        bound = structlog.contextvars.get_contextvars()

    assert bound == {"job_id": held.claim.ref.job_id, "shard": 0, "trace_id": "0af7651916cd43dd8448eb211c80319c"}
    assert structlog.contextvars.get_contextvars() == {}
