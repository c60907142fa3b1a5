"""What a step brought."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from engine.embedding.embedding_state import EmbeddingState
from engine.errors import EngineError
from engine.finish_reason import FinishReason
from engine.sampling.sampled_token import SampledToken
from engine.scheduling.request_state import RequestState
from engine.scheduling.scheduled_item import ScheduledItem

# None: not its last chunk. A reason: it ends here without a token.
TokenAnswer = tuple[ScheduledItem, RequestState, SampledToken | FinishReason | EngineError | None]
VectorAnswer = tuple[ScheduledItem, EmbeddingState, "array[float] | EngineError | None"]  # see `pool`


@dataclass(frozen=True, slots=True)
class StepAnswers:
    """What model and sampler answered for each item of a step, or why they did not."""

    tokens: list[TokenAnswer]
    vectors: list[VectorAnswer]
