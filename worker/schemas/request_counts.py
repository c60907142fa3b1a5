"""How many of a job's prompts are where."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RequestCounts(BaseModel):
    """Prompts of a job, counted from the records that were written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    total: int  # 0 for a file that was refused as a whole
    completed: int  # succeeded
    failed: int  # have an error record; cancelled and expired prompts among them

    @property
    def finished(self) -> int:
        """Prompts that have their record."""
        return self.completed + self.failed
