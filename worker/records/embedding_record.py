"""The record of a request for embeddings that ran: an OpenAI Batch result line with status 200."""

from __future__ import annotations

import base64
import sys
from array import array

from worker.lines.embedding_body import EmbeddingBody
from worker.lines.request_line import RequestLine
from worker.records.finished_request import FinishedRequest
from worker.records.record_context import RecordContext

FLOAT32_DIGITS = 9  # enough for every float32 number to come back; a vector takes half of what 17 digits would


def embedding_record(
    line: RequestLine, body: EmbeddingBody, output: FinishedRequest, context: RecordContext
) -> dict[str, object]:
    """The result line of `line`, whose body is `body`: a list of embeddings as OpenAI has it."""
    write = _base64 if body.encoding_format == "base64" else _numbers
    data = [
        {"object": "embedding", "index": index, "embedding": write(embedding)}
        for index, embedding in enumerate(output.embeddings)
    ]
    response = {
        "object": "list",
        "data": data,
        "model": context.model_name,
        "usage": {"prompt_tokens": output.num_prompt_tokens, "total_tokens": output.num_prompt_tokens},
    }
    return {
        "id": context.record_id(line.index),
        "custom_id": line.custom_id,
        "response": {"status_code": 200, "request_id": context.request_id(line.index), "body": response},
        "error": None,
    }


def _numbers(embedding: array[float]) -> list[float]:
    return [float(f"{number:.{FLOAT32_DIGITS}g}") for number in embedding]


def _base64(embedding: array[float]) -> str:
    """The float32 numbers in little-endian order, as OpenAI and its clients have them."""
    if sys.byteorder == "big":
        embedding = embedding[:]
        embedding.byteswap()
    return base64.b64encode(embedding.tobytes()).decode("ascii")
