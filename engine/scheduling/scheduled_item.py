"""One sequence's share of a step."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.sequence_state import SequenceState


@dataclass(frozen=True, slots=True)
class ScheduledItem:
    """One sequence's share of a step: tokens `start .. start + num_scheduled_tokens` are run."""

    state: SequenceState
    start: int  # = num_computed_tokens before the step; len(state.token_ids) where its token is pending
    num_scheduled_tokens: int  # >= 1
    samples: bool  # the last token so far is among them: its logits give the next one
