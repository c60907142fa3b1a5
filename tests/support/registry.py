"""The registry's classes over a test's Redis, and jobs in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import redis
from pydantic import SecretStr

from settings import LimitSettings, RedisSettings
from worker.registry.connect import connect
from worker.registry.exchange import perform, text
from worker.registry.intake import AdmissionLimits, JobIntake
from worker.registry.jobs import JobControl, JobQueries, ResultOrder
from worker.registry.keys import Keys, UnitRef
from worker.registry.leases import Claim, PromptRecord, UnitLeases
from worker.registry.lifecycle import ClaimRefusal, Outcome
from worker.registry.queues import ReapQueue, ShardQueue
from worker.schemas import JobStatus, SubmitOptions, WorkerInfo


@dataclass(frozen=True)
class TestRegistry:
    """A registry with short times. `redis` is the bare client."""

    __test__ = False

    redis: redis.Redis
    keys: Keys
    settings: RedisSettings

    @classmethod
    def at(cls, url: str) -> TestRegistry:
        settings = RedisSettings(url=SecretStr(url))
        return cls(connect(settings), Keys(), settings)

    @property
    def control(self) -> JobControl:
        return JobControl(self.redis, self.keys)

    def intake(self, *, limits: LimitSettings | None = None, admission: AdmissionLimits | None = None) -> JobIntake:
        return JobIntake(
            self.redis,
            self.keys,
            redis_settings=self.settings,
            limits=limits or LimitSettings(),
            admission=admission or AdmissionLimits(),
            grace_s=30.0,
        )

    def leases(self, *, lease_s: float = 30.0, max_attempts: int = 3, owner: str = "tester") -> UnitLeases:
        return UnitLeases(self.redis, self.keys, owner=owner, lease_s=lease_s, max_attempts=max_attempts, grace_s=30.0)

    def reap_queue(self, *, grace_s: float = 30.0, ageing_s: float = 60.0) -> ReapQueue:
        return ReapQueue(self.redis, self.keys, grace_s=grace_s, ageing_s=ageing_s)

    def shard_queue(self, *, ageing_s: float = 60.0) -> ShardQueue:
        return ShardQueue(self.redis, self.keys, ageing_s=ageing_s)

    def submit(self, lines: Sequence[bytes], options: SubmitOptions | None = None) -> str:
        """A queued job with these lines."""
        job_id = self.keys.new_job_id()
        intake = self.intake()
        intake.stage(job_id, 0, lines)
        intake.submit(job_id, len(lines), options or SubmitOptions())
        return job_id

    def running_job(self, *shards: Sequence[int], options: SubmitOptions | None = None) -> str:
        """A planned job with one line for each index of `shards`."""
        job_id = self.submit([b'{"prompt": "a"}'] * sum(map(len, shards)), options)
        leases = self.leases()
        assert leases.planned(must_claim(leases, UnitRef.plan(job_id)), shards, ageing_s=60.0)
        return job_id

    def status(self, job_id: str) -> JobStatus:
        return perform(self.redis, JobQueries(self.keys).status(job_id))

    def jobs(self, limit: int = 100) -> list[JobStatus]:
        return perform(self.redis, JobQueries(self.keys).jobs(limit))

    def workers(self) -> list[WorkerInfo]:
        return perform(self.redis, JobQueries(self.keys).workers())

    def records(self, job_id: str) -> Sequence[bytes]:
        """The first page of them, as they were written."""
        return perform(self.redis, JobQueries(self.keys).page(job_id, 0, ResultOrder.COMPLETION)).records

    def make_due(self) -> None:
        """Let every open unit be due for a look."""
        for member in self.redis.zrange(self.keys.open, 0, -1):
            self.redis.zadd(self.keys.open, {str(text(cast(bytes, member))): 1})


def must_claim(leases: UnitLeases, ref: UnitRef, *, alone: bool = False) -> Claim:
    """A claim that must succeed."""
    claim = leases.claim(ref, alone=alone)
    assert not isinstance(claim, ClaimRefusal), claim
    return claim


def ok(index: int, record: str = "{}") -> PromptRecord:
    """The record of a prompt that succeeded: 5 tokens in, 2 of them cached, 3 out."""
    return PromptRecord(index, Outcome.OK, record, prompt_tokens=5, cached_tokens=2, output_tokens=3)
