"""Shards, leases, retries and draining: the group `worker`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from settings.errors import FieldOrderError
from settings.fields import Prompts, Seconds, SettingsGroup, Unit


class WorkerSettings(SettingsGroup):
    """How a worker takes and keeps its share of the jobs."""

    concurrency: Annotated[int, Unit("shards")] = Field(
        default=16, ge=1, le=1024, description="Shards in flight in one worker; their prompts share the engine's steps."
    )
    shard_size: Prompts = Field(
        default=256, ge=1, le=100_000, description="Prompts in one shard, the unit a worker claims."
    )
    lease_s: Seconds = Field(
        default=30.0, ge=0.1, le=86_400, description="How long a claimed shard stays its worker's without renewal."
    )
    renew_interval_s: Seconds = Field(
        default=5.0, ge=0.05, le=86_400, description="How often leases are renewed; at most half of lease_s."
    )
    reap_interval_s: Seconds = Field(
        default=0.5, ge=0.05, le=3_600, description="Longest time between two looks for shards nobody holds."
    )
    reap_grace_s: Seconds = Field(
        default=30.0, ge=0, le=86_400, description="Wait before a shard nobody took is announced again; it doubles."
    )
    ageing_s: Seconds = Field(
        default=60.0, ge=0.1, le=86_400, description="Waiting that is worth one step of priority, so that none starves."
    )
    drain_timeout_s: Seconds = Field(
        default=30.0, ge=0, le=86_400, description="On stop, how long running prompts may still finish."
    )
    hang_timeout_s: Seconds = Field(
        default=120.0,
        ge=0.5,
        le=86_400,
        description="A step of the engine that takes longer loses its leases and ends the worker with 70.",
    )
    max_attempts: Annotated[int, Unit("attempts")] = Field(
        default=3,
        ge=1,
        le=100,
        description="Crashed workers, counted from one for the parts of a shard that was in a crash, after which a "
        "prompt that ran alone becomes an error.",
    )
    result_batch_size: Annotated[int, Unit("results")] = Field(
        default=200, ge=1, le=100_000, description="Most results written to Redis in one call."
    )
    send_events: bool = Field(
        default=False, description="Whether Flower is told of this worker, every 2 s, and of each shard: three events."
    )

    @model_validator(mode="after")
    def _a_lease_outlives_one_missed_renewal(self) -> WorkerSettings:
        if self.renew_interval_s * 2 > self.lease_s:
            raise FieldOrderError("renew_interval_s", "lease_s", factor=2)
        return self
