"""What a step brought."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.embedding.embedding_state import EmbeddingState
from engine.errors import EngineError
from engine.finish_reason import FinishReason
from engine.sampling.sampled_token import SampledToken
from engine.scheduling.request_state import RequestState
from engine.scheduling.scheduled_item import ScheduledItem


@dataclass(frozen=True, slots=True)
class StepAnswers:
    """What model and sampler answered for each item of a step, or why they did not."""

    # None: not its last chunk. A reason: it ends here without a token.
    tokens: list[tuple[ScheduledItem, RequestState, SampledToken | FinishReason | EngineError | None]]
    hidden: list[tuple[ScheduledItem, EmbeddingState, torch.Tensor | EngineError]]  # [n, H]: of all the item's tokens
