"""Which steps are profiled."""

from __future__ import annotations

from pydantic import BaseModel, Field

from settings.group_config import GROUP_CONFIG
from settings.units import Sequences, Steps, Tokens


class ProfileSettings(BaseModel):
    """Which steps are profiled: timed layer by layer (`layers`), or traced (`millrace run --profile FILE`).

    Timing synchronises the device and a trace takes memory and disk, so both are off unless asked for.
    """

    model_config = GROUP_CONFIG

    layers: bool = Field(default=False, description="Log the time of each layer of selected steps.")
    every_steps: Steps = Field(
        default=16, ge=1, le=1_000_000_000, description="Select one step in so many, beginning with the warm-up."
    )
    max_tokens: Tokens | None = Field(
        default=None, ge=1, le=1_048_576, description="Select only steps with at most so many tokens; none: any."
    )
    min_seqs: Sequences | None = Field(
        default=None, ge=1, le=65_536, description="Select only steps with at least so many sequences; none: any."
    )

    max_steps: Steps = Field(
        default=16, ge=1, le=1_000_000, description="Most steps that the trace of millrace run --profile holds."
    )

    def selects(self, step: int, num_tokens: int, num_seqs: int) -> bool:
        """Whether step number `step` (from 0), with `num_tokens` tokens of `num_seqs` sequences, is selected."""
        if step % self.every_steps != 0:
            return False
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            return False
        return self.min_seqs is None or num_seqs >= self.min_seqs
