from __future__ import annotations

from settings import LimitSettings
from tests.support.fake_engine import FakeEngine
from tests.support.registry import TestRegistry, must_claim
from worker.registry.claim import Claim
from worker.registry.unit_ref import UnitRef
from worker.requests.request_builder import RequestBuilder
from worker.schemas import SubmitOptions
from worker.units.shard_prompts import ShardPrompts


def _request_id(claim: Claim) -> str:
    engine = FakeEngine()
    requests = RequestBuilder(engine.tokenizer, max_model_len=engine.max_model_len, model_name="fake")
    prompts = ShardPrompts(claim, requests, engine.tokenizer, model_name="fake", limits=LimitSettings())
    return prompts.request(prompts.parse(0, b'{"prompt": "a"}')).request_id


def _claim(registry: TestRegistry, job_id: str) -> Claim:
    registry.intake().stage(job_id, 0, [b'{"prompt": "a"}'])
    registry.intake().submit(job_id, 1, SubmitOptions())
    leases = registry.leases()
    assert leases.planned(must_claim(leases, UnitRef.plan(job_id)), [[0]])
    return must_claim(leases, UnitRef.shard(job_id, 0))


def test_a_job_submitted_again_after_a_flush_has_other_request_ids(registry: TestRegistry) -> None:
    job_id = registry.keys.new_job_id()
    first = _claim(registry, job_id)
    registry.redis.flushall()
    second = _claim(registry, job_id)
    assert first.token.partition(":")[0] == second.token.partition(":")[0]
    assert _request_id(first) != _request_id(second)
    assert _request_id(first) == _request_id(first)
