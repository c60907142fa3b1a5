from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine.request import Request
from settings import LimitSettings, ModelSettings
from tests.support.fake_engine import FakeEngine
from tests.support.registry import TestRegistry, must_claim
from tests.support.request_lines import chat_line
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, PromptRecord
from worker.requests.served_model import ServedModel
from worker.runtime.shard import Prepared, ShardPrompts
from worker.schemas import SubmitOptions


def _prompts(claim: Claim, chat_template: str | None = None) -> ShardPrompts:
    model = ServedModel(FakeEngine(chat_template=chat_template), ModelSettings(name="fake"))
    return ShardPrompts(claim, model, limits=LimitSettings())


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
    assert leases.planned(must_claim(leases, UnitRef.plan(job_id)), [[0]], ageing_s=60.0)
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


def test_lines_that_cannot_be_run_become_records_and_the_others_keep_their_order(registry: TestRegistry) -> None:
    raw_lines = [b'{"prompt": "a"}', b"{", None, b'{"prompt": "b", "model": "other"}', b'{"prompt": "c"}']
    items = _prompts(_claim(registry, registry.keys.new_job_id())).prepare(enumerate(raw_lines, 5))

    requests = [request for _, request in _prepared(items) if isinstance(request, Request)]
    assert [request.prompt_token_ids for request in requests] == [[97], [99]]
    assert [line.index for line, _ in _prepared(items)] == [5, 9]
    records = [item for item in items if isinstance(item, PromptRecord)]
    codes = [json.loads(record.record)["response"]["body"]["error"]["code"] for record in records]
    assert codes == ["invalid_json_line", "missing_line", "model_not_found"]
    assert [record.index for record in records] == [6, 7, 8]


def test_what_nobody_expected_over_one_prompt_is_its_record_and_stands_in_the_log(
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
