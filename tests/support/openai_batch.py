"""A job as a program written for OpenAI's batches sees it: the batch object, two files, the package's types."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from openai.types import Batch, BatchError, Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject
from pydantic import BaseModel

from tests.support.registry import TestRegistry
from worker.records.record import BatchFile
from worker.schemas import batch_object

BODIES: dict[str, type[BaseModel]] = {
    "chat.completion": ChatCompletion,
    "text_completion": Completion,
    "list": CreateEmbeddingResponse,
}


@dataclass(frozen=True)
class OpenAIBatch:
    """Every line was checked against the package's own types."""

    batch: Batch
    output: dict[str, Any]  # custom_id -> body, as the package's type
    errors: dict[str | None, ErrorObject | BatchError]  # custom_id -> why there is no answer

    @classmethod
    def read(cls, registry: TestRegistry, job_id: str) -> Self:
        batch = Batch.model_validate(batch_object(registry.status(job_id)), strict=True)
        output: dict[str, Any] = {}
        errors: dict[str | None, ErrorObject | BatchError] = {}
        for raw in registry.records(job_id):
            record = json.loads(raw)
            assert record.keys() == {"id", "custom_id", "response", "error"}
            if BatchFile.of_record(record) is BatchFile.OUTPUT:
                output[record["custom_id"]] = _body(record)
            else:
                errors[record["custom_id"]] = _error(record)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (len(output), len(errors))
        return cls(batch, output, errors)


def _body(record: dict[str, Any]) -> Any:
    response = record["response"]
    assert (response["status_code"], record["error"]) == (200, None)
    assert isinstance(response["request_id"], str)
    body = response["body"]
    return BODIES[body["object"]].model_validate(body, strict=True)


def _error(record: dict[str, Any]) -> ErrorObject | BatchError:
    if record["response"] is None:
        return BatchError.model_validate(record["error"], strict=True)
    assert record["error"] is None
    assert record["response"]["status_code"] != 200
    return ErrorObject.model_validate(record["response"]["body"]["error"], strict=True)
