"""The record of a request that was cancelled or came too late."""

from __future__ import annotations

from worker.records.record_context import RecordContext
from worker.records.unfinished import Unfinished


def unfinished_record(
    reason: Unfinished, index: int, custom_id: str | None, context: RecordContext
) -> dict[str, object]:
    """The result line of line `index` (0-based): no response, and OpenAI's code for the reason."""
    return {
        "id": context.record_id(index),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": reason.value, "message": reason.message},
    }
