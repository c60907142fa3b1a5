"""What every record of one job has in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecordContext:
    """Which job the records belong to. Ids follow from it, so a record made twice is the same record twice."""

    job_id: str
    model_name: str  # `model` of the response bodies
    created_s: int  # Unix time; the job's, so that a prompt run again gives the same bytes

    def record_id(self, index: int) -> str:
        """`id` of the record of line `index` (0-based)."""
        return f"batch_req_{self.job_id}_{index}"

    def answered(self, index: int, custom_id: str | None, status_code: int, body: object) -> dict[str, object]:
        """The record of line `index` (0-based) with a response: OpenAI's result line."""
        return {
            "id": self.record_id(index),
            "custom_id": custom_id,
            "response": {"status_code": status_code, "request_id": f"req_{self.job_id}_{index}", "body": body},
            "error": None,
        }
