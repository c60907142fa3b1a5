"""The name of a unit of work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

PLAN = "plan"


@dataclass(frozen=True, slots=True)
class UnitRef:
    """A job's plan, or one of its shards."""

    job_id: str
    unit: str  # "plan", or the shard's number in decimal

    @classmethod
    def plan(cls, job_id: str) -> Self:
        """The plan of a job."""
        return cls(job_id, PLAN)

    @classmethod
    def shard(cls, job_id: str, number: int) -> Self:
        """Shard `number`, from 0."""
        return cls(job_id, str(number))

    @classmethod
    def of_member(cls, member: str) -> Self:
        """The unit that `member` of the open set names."""
        job_id, _, unit = member.partition("/")
        return cls(job_id, unit)

    @property
    def is_plan(self) -> bool:
        """Whether it is a job's plan."""
        return self.unit == PLAN

    @property
    def log_fields(self) -> dict[str, str | int]:
        """The names under which logs and spans have it."""
        if self.is_plan:
            return {"job_id": self.job_id}
        return {"job_id": self.job_id, "shard": int(self.unit) if self.unit.isdecimal() else self.unit}

    def __str__(self) -> str:
        return f"{self.job_id}/{self.unit}"
