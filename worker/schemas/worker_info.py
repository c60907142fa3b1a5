"""A worker as it reports itself."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class WorkerInfo(BaseModel):
    """A worker's last heartbeat, at most half a minute old."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    version: str
    model: str
    steps: int  # engine steps since it started
    open_requests: int  # prompts in its engine
    held: int  # plans and shards it holds a lease on
