"""What the sampler chose."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import EngineError
from engine.execution.pending_result import PendingResult
from engine.sampling.sampled_token import SampledToken


@dataclass(frozen=True, eq=False, slots=True)
class ChosenTokens:
    """What the sampler chose for each row, once on the device and once to be read."""

    token_ids: torch.Tensor  # [S] int64; of a row that failed or was not drawn some valid id
    answers: PendingResult[list[SampledToken | EngineError | None]]  # None: a row that was not drawn
