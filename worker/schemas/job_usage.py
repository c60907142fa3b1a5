"""What a job cost."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class JobUsage(BaseModel):
    """Tokens of the prompts that have their record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_tokens: int
    cached_tokens: int  # of input_tokens: their KV came from the prefix cache
    output_tokens: int
    reasoning_tokens: int = 0  # of output_tokens: the models' thinking, where it could be told from their answers
    resumed_tokens: int = 0  # of output_tokens: taken over from a stopped worker, not generated again
    total_tokens: int
