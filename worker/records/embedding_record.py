"""The record of a request for embeddings that ran: an OpenAI Batch result line with status 200."""

from __future__ import annotations

import base64
import sys
from array import array

from worker.lines.embedding_body import EmbeddingBody
from worker.lines.request_line import RequestLine
from worker.records.finished_request import FinishedRequest
from worker.records.record_context import RecordContext


def embedding_record(
    line: RequestLine, body: EmbeddingBody, output: FinishedRequest, context: RecordContext
) -> dict[str, object]:
    """The result line of `line`, whose body is `body`: a list of embeddings as OpenAI has it.

    Numbers stay an array, which `encode_record` writes.
    """
    in_base64 = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(embedding) if in_base64 else embedding}
        for index, embedding in enumerate(output.embeddings)
    ]
    response = {
        "object": "list",
        "data": data,
        "model": context.model_name,
        "usage": {"prompt_tokens": output.num_prompt_tokens, "total_tokens": output.num_prompt_tokens},
    }
    return context.answered(line.index, line.custom_id, 200, response)


def _base64(embedding: array[float]) -> str:
    """The float32 numbers in little-endian order, as OpenAI and its clients have them."""
    if sys.byteorder == "big":
        embedding = embedding[:]
        embedding.byteswap()
    return base64.b64encode(embedding.tobytes()).decode("ascii")
