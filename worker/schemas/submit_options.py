"""What a producer may say about a job beside its lines."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from worker.lines.endpoint import Endpoint

DEFAULT_PRIORITY = 5

_MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
_MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class SubmitOptions(BaseModel):
    """A job's options: arguments of `BatchClient.submit`, and of the message of a plain Celery producer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    priority: int = Field(default=DEFAULT_PRIORITY, ge=0, le=9, description="0 runs first, 9 last.")
    deadline_s: float | None = Field(
        default=None, gt=0, le=31_536_000, allow_inf_nan=False, description="Seconds from submission; then it expires."
    )
    tenant: str = Field(
        default="default",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Whose job it is; prompts of different tenants share no KV.",
    )
    metadata: dict[_MetadataKey, _MetadataValue] = Field(
        default_factory=dict, max_length=16, description="The producer's own notes."
    )
    idempotency_key: str | None = Field(
        default=None, min_length=1, max_length=256, description="A second submit with the same key is the first job."
    )
    endpoint: Endpoint | None = Field(
        default=None, description="The one all lines must name. None: each line its own, or, if strict, the first's."
    )
    strict: bool = Field(
        default=False, description="One bad line fails the job before any line runs; else that line fails alone."
    )
    traceparent: str | None = Field(
        default=None,
        pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$",
        description="W3C trace context of whoever submits: the job's spans are part of that trace.",
    )
