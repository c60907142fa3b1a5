"""Why a batch cannot go through `unified_forward`."""

from __future__ import annotations

from enum import Enum

from engine.errors import EngineError


class UnifiedRefusal(Enum):
    """The caller partitions on this; nothing of the batch was run."""

    PURE_DECODE = "every item is one final token: decode_batch is faster"
    SINGLE_PREFILL = "one item with several tokens: prefill is faster"
    SWITCHED_OFF = "engine.unified_prefill is off"
    TOO_MANY_TOKENS = "more tokens than engine.max_num_batched_tokens"
    TOO_MANY_SEQUENCES = "more sequences than engine.max_num_seqs"


class UnifiedRefused(EngineError):
    """`unified_forward` refused the whole batch; `reason` says why."""

    def __init__(self, reason: UnifiedRefusal, *, num_tokens: int, limit: int) -> None:
        super().__init__(f"{reason.value} ({num_tokens} tokens, limit {limit})")
        self.reason = reason
        self.num_tokens = num_tokens
        self.limit = limit
