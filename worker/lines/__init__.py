"""Request lines: what a job's JSONL may hold, and what is wrong with a line that does not.

Pure: neither torch nor the engine is imported, so that a producer can check its lines before it submits them.
"""

from __future__ import annotations

from worker.lines.chat_body import ChatBody
from worker.lines.completion_body import CompletionBody
from worker.lines.custom_ids import CustomIds
from worker.lines.embedding_body import EmbeddingBody
from worker.lines.endpoint import Endpoint
from worker.lines.line_error import LineError
from worker.lines.parse_request_line import parse_request_line
from worker.lines.read_raw_lines import read_raw_lines
from worker.lines.request_line import RequestLine

__all__ = [
    "parse_request_line",
    "RequestLine",
    "LineError",
    "CustomIds",
    "Endpoint",
    "CompletionBody",
    "ChatBody",
    "EmbeddingBody",
    "read_raw_lines",
]
