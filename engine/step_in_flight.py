"""A step that has been launched."""

from __future__ import annotations

from dataclasses import dataclass

from engine.execution.device_stream import HostCopy
from engine.execution.pending_result import PendingResult
from engine.sampling.chosen_tokens import ChosenTokens
from engine.scheduling.request_state import RequestState
from engine.scheduling.scheduled_item import ScheduledItem
from engine.step_answers import VectorAnswer


@dataclass(frozen=True, eq=False, slots=True)
class StepInFlight:
    """A step that has been launched: what reads its answers, once the one copy of them has been waited for."""

    generating: list[tuple[ScheduledItem, RequestState]]
    tokens: ChosenTokens | None  # a row for each of `generating`; None where nothing is
    scores: PendingResult[set[str]]  # the ids of the sequences whose prompt's logits are not finite
    vectors: PendingResult[list[VectorAnswer]]
    copy: HostCopy  # of the tensors of the three, in this order
