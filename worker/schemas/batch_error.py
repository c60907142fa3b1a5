"""Why a file was refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class BatchError(BaseModel):
    """An entry of `errors.data` of OpenAI's batch object.

    Codes are Azure's, as far as it has one: empty_file, too_many_tasks, invalid_json_line, duplicate_custom_id,
    url_mismatch, model_mismatch, model_not_found, and invalid_request for any other fault of a line or an option. Ours:
    file_too_large, queue_full, and batch_failed where planning crashed worker after worker.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    message: str
    line: int | None = None  # from 1, blank lines not counted; None: the fault is the whole file's
    param: str | None = None  # path inside the line's body, a field of the line, or an option
